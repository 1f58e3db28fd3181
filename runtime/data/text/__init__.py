"""Text becomes token ids: splits it into documents and tokens, and marks the begins of words and sentences."""
