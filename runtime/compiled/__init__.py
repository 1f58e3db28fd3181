"""Compiles the pieces that the plan lists, each distinct one once, and reports the time that it took."""
