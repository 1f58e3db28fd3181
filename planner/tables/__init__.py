"""The rows of a plan: they print decisions and make none.

Begin at `build`, which builds all rows. `tables` defines their columns; `reasons` and `op_notes` write their sentences.
"""
