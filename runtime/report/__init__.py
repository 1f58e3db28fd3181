"""The report of a step to the user.

Begin at `progress`. `step_report` has the figures of a step, `log` writes them; `runs/` compares runs.
"""
