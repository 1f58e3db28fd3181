"""The plan's tables, row by row: what is cut how and why, what is exchanged, what an optimizer holds."""
