"""Text becomes token ids: splits it into documents and tokens, and marks where words and sentences begin."""
