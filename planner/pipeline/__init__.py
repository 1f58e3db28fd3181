"""Stages, and the order in which each rank runs them.

Begin at `schedule`: `KINDS` has one entry for each schedule. `clock` computes times and `ledger` bytes of an order,
`simulate` shows both; `stages` and `layout` assign blocks.
"""
