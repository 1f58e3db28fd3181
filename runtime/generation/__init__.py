"""Continues prompts with a trained model: the command `generate`."""
