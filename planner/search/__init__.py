"""Which layout: every one that fits, its seconds and bytes, and why it is not the best."""
