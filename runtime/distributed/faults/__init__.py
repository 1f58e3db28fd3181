"""Identifies the rank that failed first, and the cause: from the rank itself, its process or its heartbeat."""
