"""Rewrites the many spellings of one computation to one form.

Begin at `form`: it calls all others in a fixed order. `decompose`, `layout` and `products` are tables by op; `emit`
is what they share.
"""
