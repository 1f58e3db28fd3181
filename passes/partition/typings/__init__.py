"""For each op, the types that it can take and return.

Begin at `table`: it joins one file for each family of ops. `base` is the interface of a rule over tp, and the rule
of all ops without a form of their own.
"""
