"""Reads user files within limits: nothing in them can run, hang or fill the memory. Writes our files atomically."""
