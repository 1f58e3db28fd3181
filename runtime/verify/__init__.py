"""Compares the engine with one process.

Begin at `run`. `reference` is the one process, `comparison` has the bounds, `mutants` makes plans that must fail.
"""
