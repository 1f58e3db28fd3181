"""The rows of a plan: they print decisions and make none.

Begin at `build`: all rows of a plan. `tables` are their columns, `reasons` and `op_notes` their sentences.
"""
