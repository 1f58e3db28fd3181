"""Layers of experts behind a router, found by what their ops mean: nothing here reads a name."""
