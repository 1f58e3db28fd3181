"""Whether a model is still the one that was captured, and our sources those that wrote a file."""
