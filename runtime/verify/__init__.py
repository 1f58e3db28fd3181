"""The engine beside one process."""
