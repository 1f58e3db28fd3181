"""Overrides in a spec: the blocks that they name and the styles that they set."""
