"""A rank's shards: where their values come from, and whole tensors again."""
