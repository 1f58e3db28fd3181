"""Batches: checks them, cuts them into microbatches, reads them from text.

Begin at `reading` (a source becomes tokens) and `batches` (a batch becomes this rank's microbatches). `token_batches`
chooses the samples of a step; `stream` takes them from the user's own code.
"""
