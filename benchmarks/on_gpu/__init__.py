"""What is to be seen on one GPU, part by part: `python benchmarks/gpu.py PART`."""
