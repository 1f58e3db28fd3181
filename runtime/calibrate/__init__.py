"""Measures this machine on all ranks at once, fits the results, and writes them as a cluster file."""
