"""Ops that read values of tensors on the host, to return them or to shape what they make: no CUDA graph has them.

Indexing by numbers is none of them, though PyTorch tags the op for what it does with masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = {torch.bool, torch.uint8}


def reads_on_host(target: Any, args: Sequence[Any], dtype_of: Callable[[Any], torch.dtype | None]) -> str:
    """Why no graph captures a call of ``target``; empty where one does. ``dtype_of`` an argument that is a tensor."""
    schema = getattr(target, "_schema", None)
    if schema is not None and schema.name in _INDEXING:
        by_mask = any(index is not None and dtype_of(index) in _MASKS for index in args[1])
        return f"{target} looks up on the host where its mask is true" if by_mask else ""
    tags = _TAGS & set(getattr(target, "tags", ()))
    return f"{target} reads a value on the host, or gives a shape that follows values" if tags else ""
