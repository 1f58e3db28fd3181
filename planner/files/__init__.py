"""A user's text file, read within limits: YAML, JSON, or plain; nothing in it can run, hang or fill the memory."""
