"""Batches: checks them, cuts them into microbatches, reads them from text."""
