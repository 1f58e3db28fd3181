"""Predictions beside measurements: of runs that somebody measured, on machines that a cluster file describes."""
