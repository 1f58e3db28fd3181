"""Tensors of a stage saved for its backward, observed on tensors without memory.

Begin at `trace`: the calls of a stage in order, with the memories that each reads, makes and keeps. `lowered` is a
stage traced and edited, `observe` watches tensors, `attention_kernels` knows what kernels save.
"""
