"""Runs the plan's regions as graphs: of CUDA, of Transformer Engine, or recorded on any device.

Begin at `graphs`, the interface of a backend. `region_graphs` captures single regions, `full_iteration` a whole step;
`recorded` emulates CUDA graphs on any device.
"""
