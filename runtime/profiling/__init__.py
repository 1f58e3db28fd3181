"""Measured beside planned: the actions and times of every rank in one trace, and the memory of each rank."""
