"""Steps of decode() compiled by torch: `compile=True`."""

from specheads.decoding.compiled.graphs import CompiledSteps, compiled_steps
from specheads.decoding.compiled.step_compiler import StepCompiler

__all__ = ["CompiledSteps", "StepCompiler", "compiled_steps"]
