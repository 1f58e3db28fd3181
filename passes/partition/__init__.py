"""A program over whole tensors becomes one over the parts of a rank: over the batch, the sequence and tp."""
