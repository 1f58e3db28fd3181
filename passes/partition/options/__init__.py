"""For each op, the types that it can take and return."""
