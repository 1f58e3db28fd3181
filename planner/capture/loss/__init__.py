"""How the losses of microbatches make the loss of the global batch."""
