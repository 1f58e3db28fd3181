"""Locates the attention scores, and decides whether tp divides their heads."""
