"""Rewrites the many spellings of one computation to one form."""
