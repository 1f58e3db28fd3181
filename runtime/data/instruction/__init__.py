"""Instruction data: conversations become samples in which the tokens are labels that the model would generate."""
