"""The next token of sequences: the logits of one position, found on any layout, and the token chosen from them."""
