"""A rank's shards: the sources of their values, and the gathering of full tensors.

Begin at `shards`; `sources` and `initial_weights` are where values come from.
"""
