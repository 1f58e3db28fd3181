"""The handle through which a graph waits for parameters that other ranks have updated, or hold shards of.

zero 1     wait(buffer, bucket)      the gather of an update ends
zero 3     need(units, ahead)        weights of these buckets become whole, those of ``ahead`` behind the computing
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Units = tuple[tuple[int, int], ...]  # (buffer, bucket)


class ParameterGate:
    """One rank's gathers as its graphs see them: the runtime binds ``wait``, which returns when a bucket is here, and
    ``need``, which returns when all of them are.
    """

    def __init__(self) -> None:
        self.wait: Callable[[int, int], None] | None = None
        self.need: Callable[[Units, Units], None] | None = None

    def __repr__(self) -> str:
        return "gate"


def await_bucket(gate: ParameterGate, buffer: int, bucket: int) -> None:
    """Wait until the parameters of a bucket may be read. Unbound, they never were away."""
    if gate.wait is not None:
        gate.wait(buffer, bucket)


def need_weights(gate: ParameterGate, units: Units, ahead: Units) -> None:
    """Wait until the weights of ``units`` may be read, which holds until others are needed."""
    if gate.need is not None:
        gate.need(units, ahead)


def need_again(gate: ParameterGate, read: Any, units: Units, ahead: Units) -> None:
    """Begin the backward of the op that gave ``read`` (a tensor, or several) with ``need_weights``."""
    if gate.need is None or not torch.is_grad_enabled():
        return
    node = _graph_node(read)
    if node is not None:
        node.register_prehook(partial(_before, gate, units, ahead))


def _before(gate: ParameterGate, units: Units, ahead: Units, grads: Any) -> None:
    need_weights(gate, units, ahead)


def _graph_node(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.grad_fn
    found = (_graph_node(each) for each in value) if isinstance(value, (tuple, list)) else ()
    return next((node for node in found if node is not None), None)
