"""Gradient buffers, ZeRO-1, norm, learning rate, loss scale.

Begin at `zero1`. `buffers` reduces gradients while the backward runs, `main_shards` holds what a rank updates,
`rules` and `matrices` update it, `whole_weights` is ZeRO 2 and 3.
"""
