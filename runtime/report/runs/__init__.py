"""Runs side by side: reads their logs and traces, and draws their figures over steps on one page."""
