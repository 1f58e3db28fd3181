"""How the model's tensors are made of those in its files, and those of the model's: start with `assembly`."""
