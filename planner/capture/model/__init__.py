"""Names and builds the user's model; exchanges its tensors for fakes and finds them again in the capture."""
