"""What ranks exchange in one microbatch: every message, its axis, its bytes."""
