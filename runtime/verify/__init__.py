"""Compares the engine with one process.

Begin at `run`. `reference` is one process, `comparison` the bounds, `mutants` the plans that must fail.
"""
