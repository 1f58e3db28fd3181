"""Values that a forward computes from constants alone: of them a branch may ask, for every batch gives the same answer.

    mask = torch.full((t, t), -inf).triu(1)
    if (mask == other_mask).all(): …           known: no batch tensor, parameter or random number is in it

Export knows shapes and no values. But what it has recorded so far is a graph: where a tensor is made of factory calls
and constants, the calls are run once more on real tensors, and the answer is that of every forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

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
    order = _constant_calls(node, given)
    return None if order is None else _run(order, root, given)


def _constant_calls(node: fx.Node, given: Mapping[fx.Node, Tensor]) -> list[fx.Node] | None:
    """All that ``node`` is made of, makers first; None where that is more than constants, or too large."""
    order: list[fx.Node] = []
    seen: set[fx.Node] = set()
    waiting = [(node, False)]
    while waiting:
        current, is_done = waiting.pop()
        if is_done:
            order.append(current)
        elif current not in seen:
            seen.add(current)
            if current in given:
                continue
            if not _is_constant(current):
                return None
            waiting.append((current, True))
            waiting.extend((n, False) for n in current.all_input_nodes)
    return order


def _is_constant(node: fx.Node) -> bool:
    """Whether a call adds nothing to constants; writes could be missed, so they are not followed."""
    if node.op == "get_attr":
        return True
    schema = getattr(node.target, "_schema", None)
    tags = getattr(node.target, "tags", ())
    value = node.meta.get("val")
    too_large = isinstance(value, Tensor) and value.numel() > MOST_ELEMENTS
    is_plain = schema is not None and not schema.is_mutable and torch.Tag.nondeterministic_seeded not in tags
    return node.op == "call_function" and is_plain and not too_large and not _is_written(node)


def _is_written(node: fx.Node) -> bool:
    return any(
        getattr(user.target, "_schema", None) is not None and user.target._schema.is_mutable  # pyright: ignore
        for user in node.users
    )


def _run(order: list[fx.Node], root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    values: dict[fx.Node, Any] = dict(given)
    for node in order:
        if node.op == "get_attr":
            values[node] = getattr(root, str(node.target))
            if not isinstance(values[node], Tensor) or isinstance(values[node], FakeTensor):
                return None
            continue
        args = fx.map_arg(node.args, lambda n: values[n])
        kwargs = dict(fx.map_arg(node.kwargs, lambda n: values[n]))
        values[node] = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    return values[order[-1]] if order else None
