"""What a training run is told: the recipe, its options and the arguments of transformers' trainer."""
