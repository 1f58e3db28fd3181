"""Random specs for a model, each compared with one process.

Begin at `campaign`. `specs` draws, `run` plans and starts the ranks of `rank`, `forks` makes that cheap.
"""
