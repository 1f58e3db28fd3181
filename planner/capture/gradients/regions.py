"""Regions of a forward, of torch.autocast and without gradients, are marks on its ops; casts become ops of the graph.

    with torch.autocast("cpu", dtype=torch.bfloat16):        linear(to(x, bf16), to(w, bf16), to(b, bf16))
        y = linear(x, w, b)

While a forward is exported each op is marked with its regions; the regions are not recorded, since export would give
each a graph of its own. Afterwards each op of an autocast region runs on fake tensors under autocast, which shows the
arguments that it casts. A composite op with parts that cast is written out. A region of another device does nothing to
a model on the CPU: the plan reports it. Ops without gradients read values through ``detach``:

    with torch.no_grad(): mul(h, 2)                          mul(detach(h), 2)

A graph is compared with recorded calls, one by one, while it is marked; all that comes later sees neither.

Needs:   an export under ``Regions``.
Leaves:  a graph that gives the same values without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode, make_fx
from torch.fx.proxy import TracerBase
from torch.utils._python_dispatch import TorchDispatchMode

from passes.errors import PlanError, Where
from passes.program.ops.aten import aten, has_floats, is_mutable
from passes.program.ops.groups import FILLED
from passes.program.ops.own_backward import Autocast
from passes.program.source_lines import origin_of, where_of
from planner.capture.functional import viewed, written_to
from planner.capture.memory_order import seen_through
from planner.capture.model.exchange import tensors_in
from planner.capture.user_lines import called_by_user

AUTOCAST, NO_GRAD = "autocast", "no_grad"  # marks, in the ``custom`` metadata of a node, which an export keeps


def mark_of(node: fx.Node, mark: str) -> Any:
    """Return the region that the call was recorded in, or True; None if it was recorded outside of it."""
    return (node.meta.get("custom") or {}).get(mark)


class Regions:
    """Marks ops that are recorded within a region, and keeps the line that entered each autocast region.

    ``entered``: regions that compute in another precision; ``idle``: those of other devices. ``stops``: whether the ops
    that are recorded now have no gradients. PyTorch also disables gradients within Functions of its own.
    """

    def __init__(self, here: Callable[[], Where], elsewhere: Callable[[], bool]) -> None:
        self.entered: dict[tuple[Autocast, Where], None] = {}
        self.idle: dict[tuple[str, Where], None] = {}
        self.stops = False
        self._here, self._elsewhere = here, elsewhere

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield (owner, name, replacement during an export)."""
        enter, init, create = torch.autocast.__enter__, torch.autocast.__init__, TracerBase.create_node
        recorded = PreDispatchTorchFunctionMode.__torch_function__

        def made(region: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            init(region, device_type, *args, **kwargs)
            region._asked = kwargs.get("enabled", args[1] if len(args) > 1 else True)

        def entered(region: Any) -> Any:
            if called_by_user(also="autocast_mode.py") and not self._elsewhere():  # that calls a decorated function
                self._note(region)
            return enter(region)

        def unrecorded(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch._C._set_grad_enabled:
                self.stops = not args[0]
                return func(*args)
            is_autocast = func in (torch.amp._enter_autocast, torch.amp._exit_autocast)  # which have run
            return None if is_autocast else recorded(mode, func, types, args, kwargs)

        def created(tracer: Any, *args: Any, **kwargs: Any) -> Any:
            node = create(tracer, *args, **kwargs)
            marks = {AUTOCAST: autocast_now(), NO_GRAD: self.stops}
            if any(marks.values()) and not self._elsewhere():
                node.meta["custom"] = {**(node.meta.get("custom") or {}), **marks}
            return node

        yield torch.autocast, "__init__", made
        yield torch.autocast, "__enter__", entered
        yield PreDispatchTorchFunctionMode, "__torch_function__", unrecorded
        yield TracerBase, "create_node", created

    def _note(self, region: Any) -> None:
        if region.device == "cpu":
            if region._enabled:
                self.entered[Autocast("cpu", region.fast_dtype), self._here()] = None
        elif getattr(region, "_asked", region._enabled):
            self.idle[region.device, self._here()] = None

    def told(self) -> Iterator[tuple[str, Where]]:
        """Yield the plan's notes on regions that it computes in another precision, with their lines."""
        for region, where in self.entered:
            dtype = str(region.dtype).removeprefix("torch.")
            yield f"an autocast region computes in {dtype}, with the CPU rules of autocast", where

    def warnings(self) -> Iterator[str]:
        for device, where in self.idle:
            yield (
                f"autocast({device!r}) at {where} has no effect on a model on the CPU, and none in this plan: one "
                f"process on {device} would compute this part in lower precision (write autocast(x.device.type, …))"
            )


def autocast_now() -> Autocast | None:
    """Return the autocast mode in which CPU ops run now."""
    return Autocast("cpu", torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else None


# ---- autocast, after the export


def write_casts(graph: fx.Graph) -> None:
    """Insert the casts of every marked op into the graph. Raises PlanError if they cannot be determined."""
    for node in list(graph.nodes):
        region = mark_of(node, AUTOCAST)
        if region is not None and isinstance(node.target, torch._ops.OpOverload):
            _Call(graph, node, region).write()


class _Call:
    """One call that was recorded within a region."""

    def __init__(self, graph: fx.Graph, node: fx.Node, region: Autocast) -> None:
        self.graph, self.node, self.region = graph, node, region
        self.target: Any = node.target
        self.inputs = node.all_input_nodes
        self.values: list[Any] = [n.meta.get("val") for n in self.inputs]

    def write(self) -> None:
        if not any(isinstance(v, Tensor) and v.is_floating_point() for v in self.values):
            return
        if torch._C._dispatch_has_kernel_for_dispatch_key(self.target.name(), "AutocastCPU"):
            self._cast(self._seen(True).casts)
        elif self.target is aten.einsum.default and self.node.meta["val"].dtype == self.region.dtype:
            # a product of views of its operands: a view of a cast is a cast of the view
            self._cast({id(v): self.region.dtype for v in self.values if v.dtype != self.region.dtype})
        elif self.target._can_decompose():
            seen = self._seen(True).calls
            if any(op is aten._trilinear.default for op, *_ in seen):
                raise self._refused()
            if seen != self._seen(False).calls:
                self._write_out()

    def _run(self, *values: Any) -> Any:
        env = dict(zip(self.inputs, values, strict=True))
        args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), lambda n: env[n])
        return self.target(*args, **kwargs)

    def _under_autocast(self, *values: Any) -> Any:
        with torch.autocast(self.region.device, dtype=self.region.dtype, cache_enabled=False):
            return self._run(*values)

    def _seen(self, enabled: bool) -> _Observed:
        with torch.no_grad(), _Observed() as seen:
            (self._under_autocast if enabled else self._run)(*self.values)
        return seen

    def _cast(self, casts: dict[int, torch.dtype]) -> None:
        for node, value in zip(self.inputs, self.values, strict=True):
            if id(value) in casts:
                with self.graph.inserting_before(self.node):
                    cast = seen_through(node, [(aten.to.dtype, (casts[id(value)],))], origin_of(self.node))
                self.node.replace_input_with(node, cast)
        with torch.no_grad():
            args, kwargs = fx.map_arg((self.node.args, dict(self.node.kwargs)), lambda n: n.meta["val"])
            made = _dtypes(self.target(*args, **kwargs))
        if made != _dtypes(self.node.meta["val"]) or is_mutable(self.target):
            raise self._refused()

    def _refused(self) -> PlanError:
        return PlanError(
            f"autocast does more to {self.target} than cast its arguments",
            where=where_of(self.node),
            fix="write the casts of this part explicitly, or move it out of the autocast region",
        )

    def _write_out(self) -> None:
        parts = make_fx(self._under_autocast, tracing_mode="real")(*self.values)
        env: dict[fx.Node, Any] = dict(zip(parts.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        with self.graph.inserting_before(self.node):
            for part in parts.graph.nodes:
                if part.op == "call_function":
                    env[part] = self.graph.node_copy(part, lambda n: env[n])
                    env[part].meta |= origin_of(self.node)
        result: Any = fx.map_arg(parts.graph.output_node().args[0], lambda n: env[n])
        for user in list(self.node.users) if isinstance(result, (tuple, list)) else []:
            item: Any = user.args[1]
            user.replace_all_uses_with(result[item])
            self.graph.erase_node(user)
        if not isinstance(result, (tuple, list)):
            self.node.replace_all_uses_with(result)
        self.graph.erase_node(self.node)


def _dtypes(value: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(value)]


class _Observed(TorchDispatchMode):
    """Notes ``casts``: tensor → its dtype after the cast; and ``calls``: every op, with the dtypes of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[int, torch.dtype] = {}
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, *_dtypes(result)))
        if func is aten._to_copy.default:
            self.casts.setdefault(id(args[0]), result.dtype)
        return result


# ---- regions without gradients


def stop_gradients(graph: fx.Graph) -> None:
    """Insert ``detach`` before marked calls, on operands that have a gradient.

    Raises PlanError at a write into memory of a value with a gradient that autograd does not see: in one process the
    gradient passes as if nothing had been written.
    """
    memory = _Memory()
    for node in list(graph.nodes):
        for value in node.all_input_nodes if mark_of(node, NO_GRAD) else ():
            if memory.has_gradient(value) and not (_changes_layout(node) and value is node.args[0]):
                with graph.inserting_before(node):
                    stop = seen_through(value, [(aten.detach.default, ())], origin_of(node))
                node.replace_input_with(value, stop)
                memory.note(stop)
        memory.note(node)


class _Memory:
    """Owns the memory of each value, by the node that made it. ``filled``: memory of values that have a gradient;
    ``cut``: values that are detached from the gradient of their memory.
    """

    def __init__(self) -> None:
        self._maker: dict[fx.Node, fx.Node] = {}
        self._filled: set[fx.Node] = set()
        self._cut: set[fx.Node] = set()

    def has_gradient(self, value: fx.Node) -> bool:
        return self._maker[value] in self._filled and value not in self._cut

    def note(self, node: fx.Node) -> None:
        source = viewed(node)
        self._maker[node] = node if source is None else self._maker[source]
        if source in self._cut or node.target is aten.detach.default:
            self._cut.add(node)
        gives = has_floats(node) and node.target not in FILLED and any(map(self.has_gradient, node.all_input_nodes))
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), torch.Tensor):
            gives = value.requires_grad
        if gives and source is None:
            self._filled.add(node)
        for target in () if _changes_layout(node) else written_to(node):
            self._write(node, target, gives)

    def _write(self, node: fx.Node, target: fx.Node, gives: bool) -> None:
        maker = self._maker[target]
        if target in self._cut and maker.op != "placeholder" and (gives or maker in self._filled):
            raise PlanError(
                "the forward writes in place into a value that has a gradient, under torch.no_grad() or through "
                ".detach(): a plan cannot keep its gradient",
                where=where_of(node),
                fix="write it out of place (`x = x * 2` for `x.mul_(2)`), or where autograd sees it",
            )
        if gives:
            self._filled.add(maker)


def _changes_layout(node: fx.Node) -> bool:
    """Return whether a call changes the layout of its operand, and no element: ``t_``, ``unsqueeze_``."""
    return torch.Tag.inplace_view in getattr(node.target, "tags", ())
