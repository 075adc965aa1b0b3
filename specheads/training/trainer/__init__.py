"""The trainer and its optimizers."""

from specheads.training import require_extra

require_extra()
