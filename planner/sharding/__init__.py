"""Shards, reductions and exchanges of each rank: decided once, read by all.

Begin at `shards`. `parameters` and `boxes` are what a rank holds, `buckets` and `buffers` how gradients lie and are
reduced, `homes` where a matrix is updated, `residency` when zero 3 gathers.
"""
