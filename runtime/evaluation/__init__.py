"""Trained models tried out: perplexity, cloze accuracy (`evaluate`), and continued prompts (`generate`)."""
