"""The parts of blocks that a CUDA graph may capture, and the values that cross their borders.

Begin at `regions`; `static_memory` counts the graphs, slots and bytes of each rank.
"""
