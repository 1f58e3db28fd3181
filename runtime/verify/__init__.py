"""Compares the engine with one process."""
