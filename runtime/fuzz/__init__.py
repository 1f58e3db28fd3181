"""Random specs for a model, each compared with one process."""
