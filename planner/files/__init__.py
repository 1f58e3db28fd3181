"""Reads user files within limits: nothing in them can run, hang or fill the memory. Writes our files atomically.

Begin at `text` for reading and at `atomic` for writing. `values` reads and writes the content of plan files, within the
names of `allowed`.
"""
