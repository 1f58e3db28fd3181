"""Bytes, and later seconds."""
