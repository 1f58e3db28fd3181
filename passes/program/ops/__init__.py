"""Facts of one op: its arguments, its cost, its contracted dims.

Begin at `aten`: names, packets, shapes and arguments of calls. `groups` and `sequence` are tables of ops.
"""
