"""Measuring the step costs of this machine."""

from specheads.bench.tune.run import merge, tune
from specheads.bench.tune.timing import TuneConfig

__all__ = ["TuneConfig", "merge", "tune"]
