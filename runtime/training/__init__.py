"""A training run: its options, its loop, its saves, and its resumption."""
