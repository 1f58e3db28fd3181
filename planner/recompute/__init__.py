"""Which values of a block are freed after its forward and recomputed in its backward.

Begin at `decide`; `memories` has the graph of values in which a minimum cut is the least to keep.
"""
