"""The parts of blocks that a CUDA graph may capture, and the values that cross their borders.

Begin at `regions`; `static_memory` is what their inputs and outputs occupy in each slot.
"""
