"""The sequence over cp: a program over all tokens becomes one over the tokens of a cp rank."""
