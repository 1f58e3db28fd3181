"""Who failed first, and why: told by the rank itself, or by those that watch its process and its heartbeat."""
