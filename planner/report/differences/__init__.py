"""Differences between two plans: added, removed and changed rows."""
