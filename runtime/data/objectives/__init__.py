"""Training objectives: how tokens become the sequences of a batch, and which tokens count in the loss."""
