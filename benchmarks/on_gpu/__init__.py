"""Checks for one GPU, part by part: `python benchmarks/gpu.py PART`."""
