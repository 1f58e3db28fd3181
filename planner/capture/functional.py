"""Replace ops that write into their arguments by ops that return new values, which later readers read.

    y = x[:, 0]; y.add_(1); use(x)      →      y' = y + 1;  x' = select_scatter(x, y', 1, 0);  use(x')

Every value is a sequence of views of one root. A write to a view is applied to the root by the inverse of each view,
and later reads of another view of that root use the new root. For unknown writes, torch.export does the same by
tracing everything a second time (``run_decompositions``).
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._functorch import is_batchedtensor
from torch.utils import _pytree as pytree

from passes.errors import PlanError, Where
from passes.program.ops.aten import arguments, aten, draws, is_mutable, nodes_in, permutation, written_by
from passes.program.ops.groups import PERMUTES, RESHAPES, SAME, SPLITS
from passes.program.source_lines import where_of
from planner.capture.data_dependence import shape_of_data
from planner.capture.model.exchange import storage_of


class UnknownWrite(Exception):
    """A write that this file cannot make functional, at the line ``where``: PyTorch then rewrites the whole graph."""

    where = Where()


def is_write(node: fx.Node) -> bool:
    return node.op == "call_function" and is_mutable(node.target)


def drop_needless_writes(graph: fx.Graph) -> None:
    """Erase writes in place that change nothing:

    ``detach_`` of a value without a gradient    export writes it behind a literal (``torch.tensor``)
    ``x.set_(x)``                                ``nn.utils.parametrize`` registers a parametrization so in a forward
    ``x.div_(1)``                                a first call may rescale weights so
    """
    for node in filter(_changes_nothing, list(graph.nodes)):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)


def _changes_nothing(node: fx.Node) -> bool:
    if node.target is aten.detach_.default:
        return not node.all_input_nodes[0].meta["val"].requires_grad
    if node.target is aten.set_.source_Tensor:
        return node.args[0] is node.args[1]
    is_scaling = node.target in (aten.div_.Tensor, aten.mul_.Tensor)
    return is_scaling and not node.kwargs and node.args[1] in (1, 1.0)


def make_functional(module: fx.GraphModule) -> dict[str, str]:
    """Rewrite ``module`` in place; return its written placeholders and the nodes of their last values, by name.

    Raises UnknownWrite, with ``module`` unchanged, if a write is not known.
    """
    module.graph, written = functional_graph(module)
    module.recompile()
    return written


def functional_graph(module: fx.GraphModule) -> tuple[fx.Graph, dict[str, str]]:
    """Return what ``make_functional`` would make of ``module``, as a graph of its own."""
    rewriter = _Rewriter()
    try:
        written = rewriter.run(module)
    except UnknownWrite as unknown:
        unknown.where = where_of(rewriter.at)
        raise
    return rewriter.graph, written


class _Root:
    """A piece of memory. ``value``: its current content; ``version`` counts the writes to it."""

    def __init__(self, value: fx.Node) -> None:
        self.value, self.version = value, 0


class _View:
    """A value of the old graph: its root, and the calls that make it from the root, in their order."""

    def __init__(self, root: _Root, calls: tuple[fx.Node, ...], node: fx.Node) -> None:
        self.root, self.calls, self.node, self.version = root, calls, node, root.version


class _Rewriter:
    """Owns the new graph; ``views`` has each value of the old one. ``at``: the call that is rewritten."""

    at: fx.Node

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.views: dict[fx.Node, _View] = {}
        self.written: dict[str, _Root] = {}

    def run(self, module: fx.GraphModule) -> dict[str, str]:
        for self.at in module.graph.nodes:
            if isinstance(self.at.target, torch._ops.HigherOrderOperator):
                raise UnknownWrite(str(self.at.target))
            (self._write if is_write(self.at) else self._keep)(self.at)
        return {name: root.value.name for name, root in self.written.items()}

    def _keep(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node, self._read)
        if (source := viewed(node)) is None:
            self.views[node] = _View(_Root(new), (), new)
        else:
            whole = self.views[source]
            self.views[node] = _View(whole.root, (*whole.calls, node), new)

    def _read(self, node: fx.Node) -> Any:
        view = self.views[node]
        if view.version != view.root.version:
            view.node, view.version = self._replay(view.root.value, view.calls)[-1], view.root.version
        return view.node

    def _replay(self, root: fx.Node, calls: tuple[fx.Node, ...]) -> list[fx.Node]:
        """Return the root, and each call's result from the one before."""
        made = [root]
        for call in calls:
            target, args, kwargs = _as_one_call(call)
            rest = fx.map_arg(tuple(args[1:]), self._read)
            made.append(self._emit(call, target, (made[-1], *rest), fx.map_arg(kwargs, self._read), call.meta["val"]))
        return made

    def _write(self, node: fx.Node) -> None:
        target = _functional_op(node.target)
        first = node.target._schema.arguments[0].name  # pyright: ignore
        x: Any = node.args[0] if node.args else None
        is_tensor = isinstance(x, fx.Node) and isinstance(x.meta.get("val"), Tensor)
        if target is None or written_by(node.target) != [first] or not is_tensor:
            raise UnknownWrite(str(node.target))
        view, old = self.views[x], x.meta["val"]
        value = self._fitting(node, target(self, node, self._read(x)), old)
        bases = self._replay(view.root.value, view.calls)[:-1] if view.calls else []
        for base, call in zip(reversed(bases), reversed(view.calls), strict=True):
            value = self._put_back(call, base, value)
        if view.root.value.op == "placeholder":
            self.written[view.root.value.name] = view.root
        view.root.value = value
        view.root.version += 1
        self.views[node] = _View(view.root, view.calls, self._read(x))

    def _fitting(self, node: fx.Node, value: fx.Node, old: Tensor) -> fx.Node:
        """Cast and expand a written value to the dtype and the shape of its target."""
        made = value.meta["val"]
        if made.dtype != old.dtype:
            value = self._emit(node, aten.to.dtype, (value, old.dtype), {}, made.to(old.dtype))
        if made.shape != old.shape:
            value = self._emit(node, aten.expand.default, (value, list(old.shape)), {}, old)
        return value

    def _put_back(self, call: fx.Node, base: fx.Node, part: fx.Node) -> fx.Node:
        """Return ``base`` with its view ``call`` replaced by ``part``."""
        target, args, kwargs = _as_one_call(call)
        whole = base.meta["val"]
        if target in RESHAPES:
            return self._emit(call, aten.reshape.default, (part, list(whole.shape)), {}, whole)
        if target in PERMUTES:
            moved = permutation(target, whole.dim(), args[1:], kwargs)
            order = [moved.index(d) for d in range(whole.dim())]
            return self._emit(call, aten.permute.default, (part, order), {}, whole)
        if target in SAME:
            return part
        if target is aten.unfold.default:  # PyTorch would write zeros into what no window covers
            raise PlanError(
                "a write in place into windows (unfold): overlapping windows would give one position several values",
                where=where_of(call),
                fix="write into slices or a reshape of the tensor, or compute a new tensor",
            )
        scatter = getattr(aten, f"{getattr(target, '_opname', '')}_scatter", None)  # of a slice, a position, a diagonal
        if scatter is None:
            raise UnknownWrite(str(target))
        return self._emit(call, scatter.default, (base, part, *fx.map_arg(tuple(args[1:]), self._read)), kwargs, whole)

    def _emit(self, origin: fx.Node, target: Any, args: Any, kwargs: dict[str, Any], val: Any) -> fx.Node:
        new = self.graph.create_node("call_function", target, tuple(args), kwargs, name=origin.name)
        new.meta = {**origin.meta, "val": val}
        return new


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node of which ``node`` is a view; None if it has memory of its own."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return None
    first = node.args[0] if node.args else None
    is_piece = node.target is operator.getitem and isinstance(first, fx.Node) and first.args
    source = first.args[0] if is_piece else first  # pyright: ignore
    seen = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(seen, Tensor) or is_batchedtensor(seen) or is_batchedtensor(value):  # within torch.vmap
        return None
    return source if storage_of(seen) == storage_of(value) else None  # pyright: ignore


def written_to(node: fx.Node) -> list[fx.Node]:
    """Return the values that a call writes into."""
    given = arguments(node) if is_write(node) else {}
    return [n for name, value in given.items() if name in written_by(node.target) for n in nodes_in(value)]


def _as_one_call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return (op, arguments, keywords) of a view; a piece of a split is a slice, one of an unbind a selection."""
    if node.target is not operator.getitem:
        return node.target, tuple(node.args), dict(node.kwargs)
    source: Any = node.args[0]
    index: Any = node.args[1]
    splits = isinstance(source, fx.Node) and (source.target in SPLITS or source.target is aten.tensor_split.sections)
    if not splits:
        return node.target, tuple(node.args), dict(node.kwargs)
    dim = int(arguments(source).get("dim", 0)) % source.args[0].meta["val"].dim()  # pyright: ignore
    if source.target is aten.unbind.int:
        return aten.select.int, (source.args[0], dim, index), {}
    sizes = [piece.shape[dim] for piece in source.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise shape_of_data(source)
    start = sum(sizes[:index])
    return aten.slice.Tensor, (source.args[0], dim, start, start + sizes[index]), {}


def _functional_op(target: Any) -> Callable[[_Rewriter, fx.Node, fx.Node], fx.Node] | None:
    """Return the function that emits the value that ``target`` would have written; None if it is unknown."""
    if draws(target) and target is not aten.dropout_.default:
        return None
    name, overload = target._opname, target._overloadname or "default"
    if name in _WRITES:
        return _WRITES[name]
    name = f"__{name[3:]}_" if name.startswith("__i") else name  # __ior__ writes what __or__ makes
    plain = getattr(getattr(aten, name.removesuffix("_"), None), overload, None) if name.endswith("_") else None
    if plain is None or is_mutable(plain) or torch.Tag.inplace_view in target.tags:
        return None

    def call(rewriter: _Rewriter, node: fx.Node, x: fx.Node) -> fx.Node:
        args = (x, *fx.map_arg(tuple(node.args[1:]), rewriter._read))
        kwargs = fx.map_arg(dict(node.kwargs), rewriter._read)
        values, named = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
        return rewriter._emit(node, plain, args, kwargs, plain(*values, **named))

    return call


def _filled(value: Callable[[fx.Node], Any]) -> Callable[[_Rewriter, fx.Node, fx.Node], fx.Node]:
    def fill(rewriter: _Rewriter, node: fx.Node, x: fx.Node) -> fx.Node:
        number, old = value(node), node.meta["val"]
        if isinstance(number, fx.Node):
            return rewriter._read(number)
        options = {"dtype": old.dtype, "device": old.device}
        return rewriter._emit(node, aten.full.default, ([int(n) for n in old.shape], number), options, old)

    return fill


_WRITES: dict[str, Callable[[_Rewriter, fx.Node, fx.Node], fx.Node]] = {
    "zero_": _filled(lambda node: 0),
    **dict.fromkeys(("fill_", "copy_"), _filled(lambda node: node.args[1])),
}
