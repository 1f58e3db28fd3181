"""Equal calls: the layers of a model repeat them, so what holds of one is computed once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx


def key_of(node: fx.Node) -> Hashable | None:
    """Op, arguments, shapes and dtypes; calls with equal keys differ in the values of their tensors alone.

    None for a call of symbolic sizes, or with an argument that cannot be compared.
    """
    key = (node.target, *_Reader().read((node.args, tuple(node.kwargs.items()))), _form_of(node))
    try:
        hash(key)
    except TypeError:  # a symbol is not hashable
        return None
    return key


class _Reader:
    """Numbers the operands, as a call with one operand twice is another than one with two."""

    def __init__(self) -> None:
        self._numbers: dict[fx.Node, int] = {}

    def read(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return (self._numbers.setdefault(value, len(self._numbers)), _form_of(value))
        if isinstance(value, (list, tuple)):
            return tuple([self.read(v) for v in value])
        return value if value is None else (type(value), value)  # 1 == True == 1.0


def _form_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        return tuple([_form_of_value(v) for v in value])
    return _form_of_value(value)


def _form_of_value(value: Any) -> Any:
    return (*value.shape, value.dtype) if isinstance(value, torch.Tensor) else (type(value), value)
