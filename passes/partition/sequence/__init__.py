"""Context parallelism: a program over all tokens becomes one over the tokens of a cp rank."""
