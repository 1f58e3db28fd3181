"""Stages, and the order in which each rank runs them.

Begin at `schedule`; `kinds` has one entry for each that has a name. `clock` computes times and `ledger` bytes of an
order, `simulate` shows both; `stages` and `layout` assign blocks.
"""
