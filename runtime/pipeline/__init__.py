"""The loop over a schedule's actions, and what stages send each other."""
