"""What a model is trained to tell: how tokens become the sequences of a batch, and what counts in their loss."""
