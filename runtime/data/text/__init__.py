"""Text becomes token ids: splits it into documents and tokens, and marks the starts of words and sentences."""
