"""Facts of a captured graph; no decisions."""
