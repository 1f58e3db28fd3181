"""The memory that an allocator reserves for the tensors of a rank, beyond the tensors themselves."""
