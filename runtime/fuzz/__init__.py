"""Random models and specs, each compared with one process."""
