"""Commands of the command line, one per file: their options and their output."""
