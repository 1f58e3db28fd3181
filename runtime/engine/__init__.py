"""A plan, running: one rank of it, which steps, scores, generates, saves and loads. Start with `engine`."""
