"""Benchmarks: one file each, every arm in the same run, ratios first. `python -m benchmarks --help` lists them."""
