"""Stages, and the order in which each rank runs them.

Begin at `schedule`; `kinds` lists the named schedules. `clock` computes the time and `ledger` the peak bytes of an
order, `simulate` checks it for deadlocks and draws it; `stages` and `layout` assign blocks to stages.
"""
