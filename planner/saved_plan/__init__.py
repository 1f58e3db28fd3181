"""A decided plan on disk, which a rank loads and lowers without a capture, a search or the model's code.

Begin at `plan_file`; `model` represents the model of a plan, which a loaded plan has only as a skeleton.
"""
