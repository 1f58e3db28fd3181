"""Predictions of runs that were measured, and their errors."""
