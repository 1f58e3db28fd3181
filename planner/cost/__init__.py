"""Predicts bytes and seconds.

Begin at `planned` for a plan and at `estimate` for a layout of the search. `cut/` counts the work of one cut,
`liveness` and `memory` compute bytes, `seconds/` time; pyproject.toml fixes the order of imports.
"""
