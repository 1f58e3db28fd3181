"""Context parallelism: a program over all tokens becomes one over the tokens of a cp rank.

Begin at `cut`. `flow` finds the sequences, `types` types every value by `rules`, and `partition` writes the program
of a rank by way of `versions`.
"""
