"""The types of a value over a mesh axis, and the collectives between them.

Begin at `types`: R, I, P and V, after Megatron-LM's f and g. `conversions` lists the changes between them, each with
its backward and its collectives.
"""
