"""Seconds of a step and bytes of a rank, from the costs of a cut, a layout and a cluster."""
