"""Costs of one cut of a model per block, independent of the cluster and of the microbatch size."""
