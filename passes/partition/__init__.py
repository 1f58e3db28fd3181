"""A program over whole tensors becomes one over the parts of a rank: over the batch, the sequence and tp.

Begin at `writer`: it rewrites a graph for one rank from the types of its values. `sequence/` and `typings/` decide
these types over cp and tp, `batch/` and `loss/` say what a microbatch's values mean for the global batch.
"""
