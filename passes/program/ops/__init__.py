"""Facts of one op: its arguments, its cost, its contracted dims."""
