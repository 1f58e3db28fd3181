"""Bytes, and seconds."""
