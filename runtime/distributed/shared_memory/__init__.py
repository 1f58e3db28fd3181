"""Collectives of ranks of one host over memory that they share, where tensors are on the CPU."""
