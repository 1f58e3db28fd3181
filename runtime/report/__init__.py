"""The report of a step to the user."""
