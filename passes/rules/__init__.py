"""The effect of each op on the dims of its operands, in one table. A rule knows no axis, mesh or spec."""
