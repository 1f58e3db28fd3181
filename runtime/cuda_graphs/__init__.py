"""Runs the plan's regions as graphs: of CUDA, of Transformer Engine, or recorded on any device."""
