"""The parts of blocks that a CUDA graph may capture, and the values that cross their borders."""
