"""Which values of a block are let go after its forward, and computed again in its backward."""
