"""Batch dims of values, ops that mix sequences, and the comparison of captures at two batch sizes.

Begin at `batch_typing`: the kind of every value, from two captures that `align_exports` has brought together.
`mixing` finds what mixes sequences, `orders` what reads them by their places; `sequences` holds what one capture shows.
`id_ranges` is what the integers of a batch may be.
"""
