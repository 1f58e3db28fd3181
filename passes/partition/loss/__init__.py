"""How the losses of microbatches combine into the loss of the global batch.

Begin at `shares`: it makes each term of a loss a share of the global one. `kinds` names the relations and reads the
ops of losses, `form` and `parts` find them.
"""
