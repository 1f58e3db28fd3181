"""Autograd Functions with their own backward become one op each."""
