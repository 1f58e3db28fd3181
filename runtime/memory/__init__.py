"""Measured memory of a rank, compared with the plan."""
