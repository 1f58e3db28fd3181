"""Runs of ops between collectives and products: those compiled into one function, and why others are not.

Begin at `pieces`: the decision, and its rows. `borders` says where a piece must end.
"""
