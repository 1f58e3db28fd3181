"""Evaluation of a language model: perplexity over sliding windows, cloze accuracy."""
