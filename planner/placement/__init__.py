"""The type of every value over a mesh axis, and the cheapest typing.

Begin at `decide`. `candidates` lists the types of each op with their costs, `overrides` removes some, `solve`
chooses.
"""
