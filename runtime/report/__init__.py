"""What a step says to the user."""
