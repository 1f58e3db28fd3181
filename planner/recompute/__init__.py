"""Which values of a block are freed after its forward and recomputed in its backward.

Begin at `decide`; `memories` has the graph of values that the minimum cut runs on.
"""
