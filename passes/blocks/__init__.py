"""Repeated layers, found by structure alone."""
