"""Stages, and the order in which each rank runs them."""
