"""Values that a forward computes from constants alone: Python may ask for them, as every batch gives the same answer.

    mask = torch.full((t, t), -inf).triu(1)
    if (mask == other_mask).all(): …           known: no batch tensor, parameter or random number is in it
    for length in lengths.tolist(): …          lengths = torch.tensor([4, 8])
    x[mask], x.split(lengths)                  shapes that depend on known values alone

Export knows shapes and no values. But its record so far is a graph: if a tensor is made of factory calls and constants,
the calls are run again on real tensors, with all writes into them since (``mask[0] = 1``), and the answer is that of
every forward. A tensor of known shape that results is a constant of the graph. Nothing else in the graph changes.

``Constants`` are those of a captured program: no batch tensor, parameter or buffer enters, and no random number.

    arange, zeros and a fill, tril, comparisons of these …
    ones_like(labels)      too, on request: it reads only the shape of ``labels``
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from passes.program.ops.aten import arguments, aten, is_mutable, is_random, shares_memory, written_by
from passes.program.ops.groups import VALUED
from passes.program.program import Program
from passes.program.walks import in_order, operands, walk

MOST_ELEMENTS = 1 << 24
_ASKS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
_UNKNOWN = object()


def node_of(tensor: Tensor, tracer: Any) -> Any:
    """Return the node that made a tensor; None for one that no call of this forward made."""
    return proxy_tensor.get_proxy_slot(tensor, tracer, None, lambda slot: slot.proxy.node)


def known_answer(tensor: Tensor, question: str) -> Any:
    """The result of a method without arguments (``item``, ``__bool__``, ``tolist``) on a tensor that export is tracing.

    None if it depends on anything but constants.
    """
    mode = proxy_tensor.get_proxy_mode()
    if mode is None or not isinstance(tensor, FakeTensor):
        return None
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily():
        value = _known(tensor, mode.tracer)
        return None if value is None else getattr(value, question)()


def assume(tracer: Any, node: fx.Node, value: Tensor) -> None:
    """Take ``value`` as that of ``node`` from now on, until something is written into it."""
    vars(tracer).setdefault("assumed", {})[node] = value, _writes(node)


def _writes(node: fx.Node) -> set[fx.Node]:
    return {n for n in walk([node], with_writes) if n.op == "call_function" and is_mutable(n.target)}


def _assumed(tracer: Any) -> dict[fx.Node, Tensor]:
    found = vars(tracer).get("assumed", {})
    return {node: value for node, (value, writes) in found.items() if _writes(node) == writes}


def _known(tensor: Tensor, tracer: Any) -> Tensor | None:
    node = node_of(tensor, tracer)
    if node is None and not isinstance(tensor, FakeTensor):
        holders = tracer.graph.find_nodes(op="get_attr", sort=False)
        node = next((n for n in holders if getattr(tracer.root, str(n.target), None) is tensor), None)
        if node is None:
            return None if tensor.requires_grad or tensor.is_meta else tensor
    if node is None:
        return None
    assumed = _assumed(tracer)
    return assumed[node] if node in assumed else value_of(node, tracer.root, assumed)


# ---- ops with a number, or a shape, that depends on values


def known_results(prepared: Callable[[Any, Any, Any], Any]) -> tuple[Any, str, Any]:
    """Return (owner, name, replacement) with which export records known shapes in place of those that depend on data.

    ``prepared``: the arguments of a call, given the tracing mode, the op, and the arguments before.
    """
    before: Any = proxy_tensor.ProxyTorchDispatchMode.__torch_dispatch__

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = prepared(mode, func, args)
        found = known_result(mode, func, args, kwargs or {})
        return before(mode, func, types, args, kwargs) if found is None else found

    return proxy_tensor.ProxyTorchDispatchMode, "__torch_dispatch__", dispatch


def known_result(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call under the tracing ``mode``, if it would depend on data but is known; None for all others."""
    if func not in _RESULTS and not any(tag in func.tags for tag in _ASKS):
        return None
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)

    def known(value: Any) -> Any:
        with unset_fake_temporarily():
            leaves, spec = pytree.tree_flatten(value)
            found = [_known(leaf, mode.tracer) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        lost = any(isinstance(leaf, Tensor) and x is None for leaf, x in zip(leaves, found, strict=True))
        return _UNKNOWN if lost else pytree.tree_unflatten(found, spec)

    with mode:
        return _RESULTS.get(func, _computed)(func, given, known)


def _computed(func: Any, given: dict[str, Any], known: Callable[[Any], Any]) -> Any:
    """Compute a result of known values alone."""
    values: Any = _UNKNOWN if given.get("num_classes", -1) >= 0 else known(given)
    if values is _UNKNOWN:
        return None
    with proxy_tensor.disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        result = func(**values)
    return pytree.tree_map_only(Tensor, aten.lift_fresh.default, result)


def _indexed(func: Any, given: dict[str, Any], known: Callable[[Any], Any]) -> Any:
    """x[mask] as x[places]; of one that selects everything, all rows."""
    masks = [isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in given["indices"]]
    asked = [i for i, is_mask in zip(given["indices"], masks, strict=True) if is_mask]
    values: Any = known(asked) if asked else _UNKNOWN
    if values is _UNKNOWN:
        return None
    if masks == [True] and asked[0].dim() and asked[0].dtype == torch.bool and bool(values[0].all()):
        return given["self"].flatten(0, asked[0].dim() - 1).clone()
    places = [torch.where(i) if is_mask else (i,) for i, is_mask in zip(given["indices"], masks, strict=True)]
    return func(given["self"], [place for of_one in places for place in of_one])


def _selected(func: Any, given: dict[str, Any], known: Callable[[Any], Any]) -> Any:
    x, mask = given["self"], given["mask"]
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return None if known(mask) is _UNKNOWN else x.expand(shape)[mask.expand(shape)]


def _repeated(func: Any, given: dict[str, Any], known: Callable[[Any], Any]) -> Any:
    if known(given["repeats"]) is _UNKNOWN:
        return None
    dim = given.get("dim")
    x = given["self"].flatten() if dim is None else given["self"]
    places = torch.repeat_interleave(given["repeats"].expand(x.shape[dim or 0]))
    return x.index_select(dim or 0, places)


def _cut(func: Any, given: dict[str, Any], known: Callable[[Any], Any]) -> Any:
    ends = known(given["tensor_indices_or_sections"])
    return None if ends is _UNKNOWN else torch.tensor_split(given["self"], ends.tolist(), given.get("dim", 0))


_RESULTS = {
    aten.where.default: _computed,
    aten.nonzero_numpy.default: _computed,
    aten.is_nonzero.default: _computed,
    aten.index.Tensor: _indexed,
    aten.masked_select.default: _selected,
    aten.repeat_interleave.self_Tensor: _repeated,
    aten.tensor_split.tensor_indices_or_sections: _cut,
}


# ---- the value of a node


def value_of(node: fx.Node, root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """Return the value of ``node`` from constants, attributes of ``root``, and ``given`` values; None if it reads more.

    Called with tracing and fake tensors switched off, while ``node`` is the last call that was recorded.
    """
    needed = set[fx.Node]()
    for above in walk([node], with_writes, stop=lambda n: n in given):
        if above not in given and not _is_constant(above):
            return None
        needed.add(above)
    order = in_order([node], given)
    if len(needed) > len(order):
        order = [n for n in node.graph.nodes if n in needed and n not in given]
    return _run(order, node, root, given)


def with_writes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the inputs of a value, the views of its memory, and the writes into that."""
    yield from operands(node)
    if node.op == "get_attr":
        yield from node.graph.find_nodes(op="get_attr", target=node.target, sort=False)
    for user in node.users:
        given = arguments(user)
        written = [given.get(name) for name in written_by(user.target)]
        may_be_view = shares_memory(user) and next(iter(user.args or user.kwargs.values()), None) is node
        if may_be_view or node in pytree.tree_leaves(written):
            yield user


def _is_constant(node: fx.Node) -> bool:
    """Return whether a call adds nothing to constants."""
    if node.op == "get_attr":
        return True
    sizes = [value.numel() for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    is_large = any(isinstance(size, SymInt) or size > MOST_ELEMENTS for size in sizes)
    return follows(node) and (hasattr(node.target, "_schema") or node.target is getitem) and not is_large


def _run(order: list[fx.Node], last: fx.Node, root: Any, given: Mapping[fx.Node, Tensor]) -> Tensor | None:
    values: dict[fx.Node, Any] = dict(given)
    held: dict[str, Tensor] = {}
    for node in order:
        if node.op == "get_attr":
            value = getattr(root, str(node.target))
            if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
                return None
            values[node] = held.setdefault(str(node.target), value.clone())  # it may be written to
            continue
        values[node] = computed(node, values.__getitem__)
    return values[last] if order else None


MAX_ELEMENTS = 1 << 27
SHAPE_READERS = VALUED  # of their operand the shape, or the dtype, alone; the values of an empty one are arbitrary


def follows(node: fx.Node) -> bool:
    """Return whether a call gives the same value each time that it is given the same operands."""
    return node.op == "call_function" and not is_random(node)


def is_made_of(node: fx.Node, known: Collection[fx.Node]) -> bool:
    """Whether a value is made of ``known`` ones (and of attributes of the graph) alone, without random numbers."""
    above = walk([node], operands, stop=lambda n: n in known)
    return all(n in known or n.op == "get_attr" or follows(n) for n in above)


def computed(node: fx.Node, value_of: Callable[[fx.Node], Any], device: str = "cpu") -> Any:
    """Return the result of a call for its operands' values, on ``device``."""

    def given(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        return value_of(value) if isinstance(value, fx.Node) else value

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), given)  # pyright: ignore[reportGeneralTypeIssues]
    with torch.no_grad():
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


class Constants:
    """Owns the values computed so far. ``nodes``: all constant nodes of ``program``."""

    def __init__(self, program: Program, *, of_shapes: bool = False, max_elements: int = MAX_ELEMENTS) -> None:
        self.program, self.max_elements = program, max_elements
        self.shape_readers = SHAPE_READERS if of_shapes else ()
        self.nodes: set[fx.Node] = set()
        for node in program.graph.graph.nodes:
            if self._is_constant(node):
                self.nodes.add(node)
        self._values: dict[fx.Node, Any] = {}

    def _is_constant(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            known = self.program.constants.get(node.name)
            return isinstance(known, torch.Tensor) and not known.is_meta
        if not follows(node):
            return False
        return node.target in self.shape_readers or all(n in self.nodes for n in node.all_input_nodes)

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """Return the value of a constant node on the CPU; None if it would be too large to look at."""
        for inner in in_order([node], step=lambda n: () if n.target in self.shape_readers else n.all_input_nodes):
            if inner in self._values:
                continue
            if inner.op == "placeholder":
                self._values[inner] = self.program.constants[inner.name]
                continue
            val = inner.meta["val"]
            if isinstance(val, torch.Tensor) and val.numel() > self.max_elements:
                return None
            self._values[inner] = computed(inner, self._given)
        return self._values[node]

    def _given(self, node: fx.Node) -> Any:
        if node in self._values:
            return self._values[node]
        val = node.meta["val"]
        return torch.empty((), dtype=val.dtype).expand(val.shape)  # read for its shape alone
