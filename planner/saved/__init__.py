"""Tensors of a stage saved for its backward, observed on tensors without memory."""
