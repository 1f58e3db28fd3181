"""The rows of a plan: they print decisions and make none."""
