"""What a rewritten graph calls."""
