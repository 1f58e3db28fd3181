"""Compiles the pieces that the plan lists, each distinct one once, and reports the time that it took.

Begin at `functions`; `requirements` checks before the start whether the machine can compile.
"""
