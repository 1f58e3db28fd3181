"""Processes: launching, groups, agreement between ranks."""
