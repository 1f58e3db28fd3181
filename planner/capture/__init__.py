"""A model and one microbatch become a canonical program."""
