"""The effect of each op on the dims of its operands, in one table. A rule knows no axis, mesh or spec.

Begin at `table`: every op with its rule. `notation` reads rules as text, `rule` is what one says, and of which call;
`trials` derives a rule where none is written.
"""
