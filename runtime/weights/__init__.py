"""A rank's shards: the sources of their values, and the gathering of full tensors."""
