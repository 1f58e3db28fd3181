"""Batches: checked, cut into microbatches, read from text."""
