"""Ops that a rewritten graph calls."""
