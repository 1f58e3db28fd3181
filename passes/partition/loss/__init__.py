"""How the losses of microbatches combine into the loss of the global batch."""
