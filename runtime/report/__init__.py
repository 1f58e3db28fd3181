"""The report of a step to the user.

Begin at `progress`. `step_report` is what a step says, `log` where it is written; `runs/` compares runs.
"""
