"""Functions with a backward of their own become one op each."""
