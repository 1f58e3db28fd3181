"""Files: Hugging Face directories, safetensors, written whole or not at all."""
