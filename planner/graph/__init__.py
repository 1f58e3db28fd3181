"""Facts of a captured graph: nothing here decides."""
