"""Layout search: every layout that fits, its seconds and bytes, and why it is not the best."""
