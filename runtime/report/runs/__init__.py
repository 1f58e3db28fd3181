"""Whole runs side by side: their logs and traces read, their figures over steps as one page."""
