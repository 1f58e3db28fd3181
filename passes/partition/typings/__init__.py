"""For each op, the types that it can take and return.

Begin at `table`: it joins one file for each family of ops. `base` is the interface of a rule over tp; `by_factors`
serves all ops without a form of their own.
"""
