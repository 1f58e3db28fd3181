"""Runs the plan's regions as graphs: of CUDA, of Transformer Engine, or recorded on any device.

Begin at `graphs`: the interface of a backend. `region_graphs` captures one region, `full_iteration` all of a step;
`recorded` stands in for CUDA on any device.
"""
