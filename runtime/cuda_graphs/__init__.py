"""Runs the regions that the plan marks as graphs: of CUDA, of Transformer Engine, or recorded on any device."""
