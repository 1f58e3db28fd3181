"""Which values of a block are freed after its forward and recomputed in its backward."""
