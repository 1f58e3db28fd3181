"""Runs the user's own module in eager mode beside a run, and compares the losses."""
