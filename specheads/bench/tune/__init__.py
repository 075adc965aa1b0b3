"""The step costs of this machine, measured."""

from specheads.bench.tune.run import merge, tune
from specheads.bench.tune.timing import TuneConfig

__all__ = ["TuneConfig", "merge", "tune"]
