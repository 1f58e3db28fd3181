"""Commands of the command line, one a file: their options, and what they print."""
