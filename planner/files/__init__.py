"""A user's files read within limits: nothing in them can run, hang or fill the memory. Ours are written atomically."""
