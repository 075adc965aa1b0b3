"""What defines a training run: the recipe, its options and the arguments of transformers' trainer."""

from specheads.training import require_extra

require_extra()
