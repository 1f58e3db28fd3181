"""Data-dependent row selection (`x[mask]` … `index_add`, sum or loss), rewritten as a dense computation with a mask.

Begin at `settle`. `questions` are what a forward asks of values, `dense` computes all rows and masks the rest,
`totals` adds them up.
"""
