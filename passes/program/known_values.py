"""Values that a forward computes from constants alone: a branch may depend on them, since every batch gives the same
answer.

    mask = torch.full((t, t), -inf).triu(1)
    if (mask == other_mask).all(): …           known: no batch tensor, parameter or random number is in it

Export knows shapes and no values. But its record so far is a graph: if a tensor is made of factory calls and constants,
the calls are run again on real tensors, with all writes into them since (``mask[0] = 1``), and the answer is that of
every forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from passes.program.constants import computed, follows
from passes.program.ops.aten import is_mutable, shares_memory
from passes.program.walks import in_order, operands, walk

MOST_ELEMENTS = 1 << 24


def node_of(tensor: Tensor, tracer: Any) -> Any:
    """The node that made a tensor; None for one that no call of this forward made."""
    return proxy_tensor.get_proxy_slot(tensor, tracer, None, lambda slot: slot.proxy.node)


def known_answer(tensor: Tensor, question: str) -> Any:
    """The result of a method without arguments (``item``, ``__bool__``, ``tolist``) on a tensor that export is tracing.

    None if it depends on anything but constants.
    """
    mode = proxy_tensor.get_proxy_mode()
    node = node_of(tensor, mode.tracer) if mode is not None and isinstance(tensor, FakeTensor) else None
    if mode is None or node is None:
        return None
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        value = value_of(node, mode.tracer.root, {})
        return None if value is None else getattr(value, question)()


def value_of(node: fx.Node, root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The value of ``node`` from constants, attributes of ``root``, and ``given`` values; None if it reads more.

    Called with tracing and fake tensors switched off, while ``node`` is the last call that was recorded.
    """
    needed = set(walk([node], _with_writes, stop=lambda n: n in given))
    if not all(n in given or _is_constant(n) for n in needed):
        return None
    order = in_order([node], given)
    if len(needed) > len(order):
        order = [n for n in node.graph.nodes if n in needed and n not in given]
    return _run(order, node, root, given)


def _with_writes(node: fx.Node) -> Iterator[fx.Node]:
    """The inputs of a value, the views of its memory, and the writes into that."""
    yield from operands(node)
    yield from (user for user in node.users if is_mutable(user.target) or shares_memory(user))


def _is_constant(node: fx.Node) -> bool:
    """Whether a call adds nothing to constants."""
    if node.op == "get_attr":
        return True
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, Tensor) else 0
    is_large = isinstance(size, SymInt) or size > MOST_ELEMENTS
    return follows(node) and hasattr(node.target, "_schema") and not is_large


def _run(order: list[fx.Node], last: fx.Node, root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    values: dict[fx.Node, Any] = dict(given)
    for node in order:
        if node.op == "get_attr":
            value = getattr(root, str(node.target))
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                return None
            values[node] = value.clone()  # it may be written to
            continue
        values[node] = computed(node, values.__getitem__)
    return values[last] if order else None
