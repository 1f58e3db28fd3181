"""Values that a forward computes from constants alone: of them a branch may ask, for every batch gives the same answer.

    mask = torch.full((t, t), -inf).triu(1)
    if (mask == other_mask).all(): …           known: no batch tensor, parameter or random number is in it

Export knows shapes and no values. But what it has recorded so far is a graph: where a tensor is made of factory calls
and constants, the calls are run once more on real tensors, and the answer is that of every forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from planner.graph.constants import computed, follows
from planner.graph.ops.aten import is_mutable
from planner.graph.walks import in_order, operands, walk

MOST_ELEMENTS = 1 << 24


def node_of(tensor: Tensor, tracer: Any) -> Any:
    """The node that made a tensor; None for one that no call of this forward made."""
    return proxy_tensor.get_proxy_slot(tensor, tracer, None, lambda slot: slot.proxy.node)


def known_answer(tensor: Tensor, question: str) -> Any:
    """What a method without arguments (``item``, ``__bool__``, ``tolist``) gives of a tensor that export is tracing.

    None where it depends on anything but constants.
    """
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(tensor, mode.tracer) if mode is not None and isinstance(tensor, FakeTensor) else None
    if mode is None or node is None:
        return None
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        value = value_of(node, mode.tracer.root, {})
        return None if value is None else getattr(value, question)()


def value_of(node: fx.Node, root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """What ``node`` computes from constants, attributes of ``root``, and ``given`` values; None where it reads more.

    Called with tracing and fake tensors switched off.
    """
    above = walk([node], operands, stop=lambda n: n in given)
    if not all(n in given or _is_constant(n) for n in above):
        return None
    return _run(in_order([node], given), root, given)


def _is_constant(node: fx.Node) -> bool:
    """Whether a call adds nothing to constants; writes could be missed, so they are not followed."""
    if node.op == "get_attr":
        return True
    value = node.meta.get("val")
    too_large = isinstance(value, Tensor) and value.numel() > MOST_ELEMENTS
    is_plain = hasattr(node.target, "_schema") and not is_mutable(node.target)
    return follows(node) and is_plain and not too_large and not any(is_mutable(user.target) for user in node.users)


def _run(order: list[fx.Node], root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    values: dict[fx.Node, Any] = dict(given)
    for node in order:
        if node.op == "get_attr":
            values[node] = getattr(root, str(node.target))
            if not isinstance(values[node], Tensor) or isinstance(values[node], FakeTensor):
                return None
            continue
        values[node] = computed(node, values.__getitem__)
    return values[order[-1]] if order else None
