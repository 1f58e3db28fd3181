"""Shards, reductions and exchanges of each rank: decided once, read by all."""
