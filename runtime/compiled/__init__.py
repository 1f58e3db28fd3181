"""Compiles the pieces that the plan lists, each distinct one once, and reports the time that it took.

Begin at `functions`; `requirements` says before the start what a machine lacks.
"""
