"""Identifies the rank that failed first, and the cause: from the rank itself, its process or its heartbeat.

Begin at `faults`. `board` carries messages, `watch` is the thread that reads them and decides which ranks are dead.
"""
