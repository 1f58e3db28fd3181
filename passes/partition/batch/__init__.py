"""Batch dims of values, ops that mix sequences, and the comparison of captures at two batch sizes."""
