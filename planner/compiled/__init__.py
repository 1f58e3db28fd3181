"""Runs of ops between collectives and products: those compiled into one function, and why others are not."""
