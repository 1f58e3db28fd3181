"""Text becomes token ids: documents are found, cut into tokens, and marked where words and sentences begin."""
