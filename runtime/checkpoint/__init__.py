"""Files: the training state, and Hugging Face directories; written completely or not at all."""
