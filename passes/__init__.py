"""The passes rewrite: (captured graph, Plan, rank) become the modules that this rank runs."""
