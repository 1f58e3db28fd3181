"""What one cut of a model costs, block by block, free of any cluster and of the size of a microbatch."""
