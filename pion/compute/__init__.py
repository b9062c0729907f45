"""The only modules that import mlx."""
