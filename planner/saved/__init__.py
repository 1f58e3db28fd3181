"""What autograd keeps of a stage for its backward, seen on tensors without memory."""
