"""The update rule and settings of each parameter."""
