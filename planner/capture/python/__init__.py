"""Python behaviour of a forward outside the graph: kept, or refused at the source line.

Begin at `watch`: it sees what a forward does beside its graph. `state` and `modules` compare Python's values before
and after it; `eager_answers` checks branches against a forward that runs.
"""
