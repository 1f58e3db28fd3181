"""Models that are drawn: plain PyTorch, as a user would write it."""
