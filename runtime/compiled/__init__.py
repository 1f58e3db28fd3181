"""Compiles the pieces that the plan lists, each distinct one once, and says what that took."""
