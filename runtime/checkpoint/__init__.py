"""Files: the training state, Hugging Face directories; written whole or not at all."""
