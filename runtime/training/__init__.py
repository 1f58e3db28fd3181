"""A training run: its options, its loop, its saves, and its resumption.

Begin at `run` (the command) and `loop` (a rank). `job` holds the options, `data` the batches, `saving` and
`validation` what happens between steps, `showing` what rank 0 prints.
"""
