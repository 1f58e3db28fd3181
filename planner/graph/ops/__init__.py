"""Facts of one op: its arguments, its cost, what it contracts."""
