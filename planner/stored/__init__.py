"""A decided plan on disk, which a rank loads and lowers without a capture, a search or the model's code."""
