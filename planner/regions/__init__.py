"""Which parts of blocks a CUDA graph may capture, and what crosses their borders."""
