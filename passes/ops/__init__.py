"""Ops that a rewritten graph calls.

One file for each family: the function that a graph calls, its backward, and the shapes that it gives without values.
`axis` is the handle of a mesh axis; the others take it as an argument.
"""
