"""What this machine can do: short measurements on all ranks at once, fitted, and written as a cluster file."""
