"""The rows of a plan: they print what was decided, and decide nothing."""
