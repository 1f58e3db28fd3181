"""Canonical form: many ATen spellings of one idea become one, so that the rule table stays small.

    linear(x, W, b), addmm, baddbmm      → the product, then an add      (a row-parallel bias is added after the sum)
    view, t, chunk, select, stack, to …  → reshape, permute, split, slice, cat, to.dtype    (passes.canonical.layout)
    cross_entropy over [n, classes, d]   → over rows [n·d, classes]
    dropout that drops nothing, asserts  → nothing
    detach(f(x, y))                      → f(detach(x), detach(y))          straight-through estimators, scales of bits
    max(x, dim)[0], min of no gradient   → amax(x, dim), amin
    own_backward(tensors, key)           → the user's Function (passes.program.ops.own_backward)

If every reader of a value stops its gradient, the gradient stops before the op that makes the value: none is planned,
and nothing is kept, for calls that none flows through. ``meta["stopped"]``: their values depend on some that have one.

Leaves:  one flat graph of functional ops with the tuple of the requested tensors as output; every node has
         ``meta["val"]`` and ``meta["grad"]``; nothing dead.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from passes.canonical.branches import join_branches
from passes.canonical.decompose import LAYERS, SPELLED, HasRule, frequency_scaled, traced, written_out
from passes.canonical.emit import Emit, table
from passes.canonical.heads import join_heads
from passes.canonical.layout import LAYOUT
from passes.canonical.products import PRODUCTS, loss_of_rows
from passes.errors import PlanError
from passes.program.builder import Builder, prune
from passes.program.ops.aten import aten, has_floats, named, nodes_in
from passes.program.ops.groups import FILLED, VALUED
from passes.program.ops.own_backward import OWN_BACKWARD, OwnBackward, recorded
from passes.program.program import Unwritten
from passes.program.source_lines import origin_of, where_of


def canonicalize(
    source: fx.GraphModule,
    outputs: dict[str, str],
    constants: Mapping[str, torch.Tensor] | None = None,
    unread: Iterable[str] = (),
    *,
    has_rule: HasRule,
) -> fx.GraphModule:
    """Return a new GraphModule in canonical form that returns the nodes named in ``outputs`` (values), in that order.

    ``constants``: placeholder name → value, for indices that are written as a slice. ``unread``: placeholders that
    nothing reads, left out. ``has_rule``: ops without a rule are written out if that helps (canonical.decompose).
    """
    writer = _Writer(constants or {}, has_rule)
    env: dict[fx.Node, Any] = {}
    for node in source.graph.nodes:
        if node.op == "placeholder" and node.name not in unread:
            env[node] = writer.placeholder(node)
    writer.copy_body(source, env)
    by_name = {node.name: node for node in source.graph.nodes}
    writer.graph.output(tuple(env[by_name[name]] for name in outputs.values()))
    _fill_alone(writer.graph)
    module = Unwritten(torch.nn.Module(), writer.graph)
    prune(module.graph)
    if stop_early(module.graph) | join_branches(module.graph, writer.copy_body) | join_heads(module.graph, writer.emit):
        prune(module.graph)
    return module


def _fill_alone(graph: fx.Graph) -> None:
    """Give ``zeros_like(x)`` and its kind sizes where nothing reads values of x, which is then not computed."""
    for node in graph.nodes:
        source = node.all_input_nodes[0] if node.target in VALUED and node.all_input_nodes else None
        if source is None or source.op != "call_function" or any(user.target not in VALUED for user in source.users):
            continue
        given = named(node)
        fill: Any = given["fill_value"] if "fill_value" in given else int(node.target(torch.empty(())))  # pyright: ignore
        node.target, (node.args, node.kwargs) = aten.full.default, _filled(node.meta["val"], fill)


def stop_early(graph: fx.Graph) -> bool:
    """Move every detach up to the values that others read with a gradient; whether anything changed."""
    stopped = _stopped(graph)
    detached: dict[fx.Node, fx.Node] = {}
    for node in stopped:
        for value in node.all_input_nodes:
            if value.meta["grad"] and value not in stopped:
                if value not in detached:
                    build, val = Builder(graph, node, node), value.meta["val"].detach()
                    detached[value] = build.call(aten.detach.default, value, val=val, grad=False)
                    detached[value].meta["stopped"] = True
                node.replace_input_with(value, detached[value])
    for node in stopped:
        node.meta["grad"], node.meta["stopped"] = False, True
        node.meta["val"] = tree_map_only(torch.Tensor, torch.Tensor.detach, node.meta["val"])
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        if node.all_input_nodes[0] in stopped:
            node.replace_all_uses_with(node.all_input_nodes[0])
    for node in stopped:
        if node.target in (aten.max.dim, aten.min.dim):
            _pick(graph, node)
    return bool(stopped)


def _stopped(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return calls with some readers that stop the gradient and none that passes it on, in the order of the graph."""
    found: dict[fx.Node, None] = {}

    def stops(user: fx.Node) -> bool:
        return user in found or user.target is aten.detach.default

    for node in reversed(graph.nodes):
        if node.op != "call_function" or not node.meta["grad"] or isinstance(node.target, OwnBackward):
            continue
        if any(map(stops, node.users)) and all(stops(u) or u.meta.get("grad") is False for u in node.users):
            found[node] = None
    return dict.fromkeys(n for n in reversed(found) if n.target is not operator.getitem or n.args[0] in found)


def _pick(graph: fx.Graph, node: fx.Node) -> None:
    """Replace max and min by amax and amin: which of equal elements is chosen matters to readers of the index alone."""
    if any(user.target is not operator.getitem or user.args[1] for user in node.users):
        return
    given, extreme = named(node), aten.amax if node.target is aten.max.dim else aten.amin
    with graph.inserting_before(node):
        new = graph.call_function(extreme.default, (given["self"], [given["dim"]], given["keepdim"]))
    new.meta = node.meta | {"val": node.meta["val"][0]}
    for user in list(node.users):
        user.replace_all_uses_with(new)


class _Writer:
    """Owns the graph under construction."""

    def __init__(self, constants: Mapping[str, torch.Tensor], has_rule: HasRule) -> None:
        self.graph = fx.Graph()
        self.constants, self.has_rule = constants, has_rule

    def placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.placeholder(node.name)
        value = node.meta.get("val")
        new.meta["val"] = value
        new.meta["grad"] = isinstance(value, torch.Tensor) and value.requires_grad
        if node.name in self.constants:
            new.meta["constant"] = self.constants[node.name]
        return new

    def copy_body(self, source: fx.GraphModule, env: dict[fx.Node, Any]) -> Any:
        """Copy every call of ``source``; returns the arguments of its output node."""
        for node in source.graph.nodes:
            if node.op == "output":
                return fx.map_arg(node.args[0], lambda n: env[n])
            if node.op == "get_attr":
                env[node] = operator.attrgetter(str(node.target))(source)
            elif node.op == "call_function":
                env[node] = self._rewrite(node, env)
        return None

    def _rewrite(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise _refused(node)
        args = fx.map_arg(node.args, lambda n: env[n])
        kwargs = fx.map_arg(node.kwargs, lambda n: env[n])
        rewrite, layer = REWRITES.get(node.target), LAYERS.get(node.target)
        written = layer(node, named(node, args, kwargs)) if layer is not None else None
        if written is not None:
            return self._write_out(traced(*written, {}), node, written[1], {})
        if (spelled := SPELLED.get(node.target)) is not None:
            return self._write_out(traced(spelled, args, kwargs), node, args, kwargs)
        if rewrite is None:
            parts = written_out(node, args, kwargs, SPELLINGS, self.has_rule)
            if parts is not None:
                return self._write_out(parts, node, args, kwargs)
            return self.emit(node, node.target, args, dict(kwargs), node.meta.get("val"))
        return rewrite(lambda *a, **k: self.emit(node, *a, **k), node, list(args), dict(kwargs))

    def _write_out(self, parts: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Copy the parts of a composite op in its place, each with the user's line of the composite op."""
        holders = parts.graph.find_nodes(op="placeholder")
        for inner in parts.graph.nodes:
            inner.meta.update(origin_of(node))
        return self.copy_body(parts, dict(zip(holders, dict.fromkeys(nodes_in((args, kwargs))), strict=True)))

    def emit(
        self, origin: fx.Node, target: Any, args: Any, kwargs: dict[str, Any] | None = None, val: Any = None
    ) -> Any:
        """Add one call; a getitem on a python tuple (of a rewritten call) is resolved at once."""
        if target is operator.getitem and not isinstance(args[0], fx.Node):
            return args[0][args[1]]
        new = self.graph.create_node("call_function", target, tuple(args), kwargs or {}, name=origin.name)
        new.meta = origin_of(origin) | {"val": val}
        stops = target is aten.detach.default or target in FILLED  # of zeros_like(x) x has no gradient
        new.meta["grad"] = not stops and has_floats(new) and any(n.meta["grad"] for n in new.all_input_nodes)
        return new


def _refused(node: fx.Node) -> PlanError:
    """Return the error of a call that runs graphs of its own."""
    own_name = getattr(node.target, "name", None)
    name = own_name() if callable(own_name) else str(node.target)
    return PlanError(
        f"the model uses {name}, which cannot be planned",
        where=where_of(node),
        fix="compute both results and choose by `torch.where(condition, a, b)`"
        if name == "cond"
        else "write this part with ordinary tensor operations",
    )


def _identity(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return None


def _linear(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    val, bias = node.meta["val"], args[2] if len(args) > 2 else kwargs.get("bias")
    product = emit(aten.linear.default, (args[0], args[1]), {}, val)
    return product if bias is None else emit(aten.add.Tensor, (product, bias), {}, val)


def _scaled(emit: Emit, x: fx.Node, factor: Any) -> fx.Node:
    return x if factor == 1 else emit(aten.mul.Tensor, (x, factor), {}, x.meta["val"])


def _add_product(product_op: Any) -> Callable[..., Any]:
    def rewrite(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        val = node.meta["val"]
        product = emit(product_op, (args[1], args[2]), {}, val)
        product = _scaled(emit, product, kwargs.get("alpha", 1))
        if kwargs.get("beta", 1) == 0:
            return product
        return emit(aten.add.Tensor, (product, _scaled(emit, args[0], kwargs.get("beta", 1))), {}, val)

    return rewrite


def _dropout(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    p, active = float(args[1]), bool(args[2])
    if p == 0.0 or not active:
        return args[0] if node.target is aten.dropout.default else (args[0],)
    val = node.meta["val"]
    return emit(aten.dropout.default, (args[0], p, True), {}, val if isinstance(val, torch.Tensor) else val[0])


def _native_layer_norm(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Leave out mean and deviation: they are for a backward that this graph does not run."""
    return emit(aten.layer_norm.default, args, kwargs, node.meta["val"][0]), None, None


def _embedding(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Drop ``sparse``: it changes how the gradient is stored, not its values, and that of a shard is dense."""
    if len(args) > 3 and args[3]:
        raise frequency_scaled(node)
    return emit(aten.embedding.default, tuple(args[:3]), {}, node.meta["val"])


def _cross_entropy(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Rewrite a loss of class ids as one of rows."""
    if args[1].meta["val"].is_floating_point():
        return emit(node.target, args, kwargs, node.meta["val"])
    return loss_of_rows(emit, args, kwargs, node.meta["val"])


def _new_filled(value: float | None) -> Callable[..., Any]:
    """Replace ``x.new_ones(sizes)``, which reads no value of x, by a plain factory call."""

    def rewrite(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        val = node.meta["val"]
        return emit(aten.full.default, *_filled(val, args[2] if value is None else value), val)

    return rewrite


def _filled(val: torch.Tensor, fill: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a factory call."""
    sizes, filled = [int(n) for n in val.shape], bool(fill) if val.dtype == torch.bool else fill
    return (sizes, filled), {"dtype": val.dtype, "device": val.device}


def _own_backward(emit: Emit, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Put a Function of the user's in its place; inputs and results without a gradient are detached."""
    call = recorded(args[1])
    operands = [o if r else _cut_off(emit, o) for o, r in zip(args[0], call.facts.reached, strict=True)]
    vals = list(node.meta["val"])
    if len(vals) == 1:
        return (_given(emit, call, emit(call, operands, {}, vals[0]), 0),)
    made = emit(call, operands, {}, vals)
    return tuple(_given(emit, call, emit(operator.getitem, (made, i), {}, val), i) for i, val in enumerate(vals))


def _given(emit: Emit, call: OwnBackward, value: fx.Node, position: int) -> fx.Node:
    return value if call.made[position].differentiable else _cut_off(emit, value)


def _cut_off(emit: Emit, value: fx.Node) -> fx.Node:
    return emit(aten.detach.default, (value,), {}, value.meta["val"].detach()) if value.meta["grad"] else value


REWRITES: dict[Any, Callable[..., Any]] = (
    {OWN_BACKWARD: _own_backward}
    | table(
        {
            _identity: "alias lift_fresh lift_fresh_copy lift view_as_real_copy item _local_scalar_dense",
            _nothing: "_assert_tensor_metadata _assert_async.msg _assert_async _assert_scalar sym_constrain_range "
            "sym_constrain_range_for_size",
            _linear: "linear",
            _add_product(aten.mm.default): "addmm",
            _add_product(aten.bmm.default): "baddbmm",
            _dropout: "dropout native_dropout",
            _native_layer_norm: "native_layer_norm",
            _embedding: "embedding",
            _cross_entropy: "cross_entropy_loss",
            _new_filled(1): "new_ones",
            _new_filled(0): "new_zeros new_empty new_empty_strided",
            _new_filled(None): "new_full",
        }
    )
    | LAYOUT
    | PRODUCTS
)
SPELLINGS = REWRITES.keys() | SPELLED.keys() | LAYERS.keys()
