"""A decided plan on disk, which a rank loads and lowers without a capture, a search or the model's code.

Begin at `plan_file`; `model` says which weights a loaded plan takes.
"""
