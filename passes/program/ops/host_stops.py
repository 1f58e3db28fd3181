"""Ops that read values of tensors on the host, to return them or to shape their results: no CUDA graph captures them.

PyTorch tags them. An index of integers is none of them, though tagged because of masks, nor is a mask that is filled
with one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from passes.program.ops.aten import aten, packet_of
from passes.program.ops.ctc import CTC_LOSSES

_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_LENGTHS = {CTC_LOSSES}  # loops on the host over a number of frames that depends on data
_MASKS = {torch.bool, torch.uint8}


def reads_on_host(target: Any, args: Sequence[Any], value_of: Callable[[Any], Any] = lambda value: value) -> bool:
    """Whether a call waits for the device. ``value_of`` an argument: the tensor that it is, or one like it."""
    puts = packet_of(target) in (aten.index_put, aten.index_put_, aten._index_put_impl_)
    if target is aten.index.Tensor or puts:
        by_mask = any(index is not None and value_of(index).dtype in _MASKS for index in args[1])
        fills = puts and value_of(args[2]).numel() == 1 and args[3:4] != (True,)
        return by_mask and not fills
    if target is aten.one_hot.default:
        return (*args[1:], -1)[0] == -1
    return target in _LENGTHS or bool(_TAGS & set(getattr(target, "tags", ())))
