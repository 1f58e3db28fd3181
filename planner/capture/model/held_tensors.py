"""Replace constants of the graph that are parameters of the model, or views of their memory, by these parameters.

    partial(F.linear, weight=self.emb.weight)      the parameter itself
    self.wt = self.w.t()                           permute of it, as its gradient and its updates show there
    lambda x: x @ w.data                           detach of it

A tensor that a closure holds reaches export as a value without a name. It is recognised by its memory, which is that of
a tensor of the model (planner.capture.model.exchange). A tensor that requires a gradient and is not the model's is
refused with the user's line: the optimizer would not update it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram

from passes.errors import PlanError, Where
from passes.program.source_lines import origin_of, where_of
from passes.program.walks import last_of_header
from planner.capture.memory_order import Layout, Views, seen_through, views_of
from planner.capture.model.exchange import Exchange, storage_of
from planner.capture.python.draws import Draw
from planner.capture.user_lines import CallSites

aten = torch.ops.aten


@dataclass(frozen=True)
class HeldTensor:
    """The tensor ``fqn`` of the model, seen through ``views``: the identity of a constant."""

    fqn: str
    views: Views = ()


class ForeignTensors:
    """Refuses, while a forward runs, tensors that require a gradient and are not derived from parameters."""

    def __init__(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange, self._sites = exchange, CallSites(model)
        self._known: dict[int, Tensor] = {}  # held, so that no other tensor gets the number of one that is gone

    def check(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Check the arguments of a torch function."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, (list, tuple)):
                self.check(value, None)
            elif isinstance(value, Draw):
                value.refuse()
            elif isinstance(value, Tensor) and not isinstance(value, FakeTensor) and id(value) not in self._known:
                self._check(value)

    def _check(self, tensor: Tensor) -> None:
        if tensor.requires_grad and self._exchange.original(tensor) is None:
            raise PlanError(
                f"the forward computes with a {'parameter' if isinstance(tensor, nn.Parameter) else 'tensor'} "
                f"{list(tensor.shape)} that requires a gradient but is not a parameter of the model: an optimizer "
                "of model.parameters() would not train it",
                where=self._sites.here(),
                fix="register it: make it an nn.Parameter attribute of a module, a list of modules an nn.ModuleList; "
                "or detach it",
            )
        self._known[id(tensor)] = tensor


def held_tensors(exported: ExportedProgram, model: nn.Module, exchange: Exchange) -> dict[str, HeldTensor]:
    """Return constants that are tensors of the model, by name, while exchanged. Raises PlanError at a reader."""
    names = {id(t): n for n, t in [*model.named_buffers(), *model.named_parameters()]}
    lifted, found = exported.graph_signature.inputs_to_lifted_tensor_constants, {}
    for holder in exported.graph.find_nodes(op="placeholder"):
        name = lifted.get(holder.name, "")
        value = exported.constants.get(name)
        owner = exchange.original(value) if isinstance(value, Tensor) else None
        if owner is not None and id(owner) in names:
            fqn = names[id(owner)]
            found[name] = HeldTensor(fqn, _views(value, owner, exchange.values(owner), fqn, holder))
    return found


def read_kept_values(exported: ExportedProgram) -> None:
    """Replace values that autograd kept for a gradient inside the forward by the nodes with the same memory.

    Export sees the copy that autograd returns, without memory of its own, and takes it for a constant.
    """
    lifted = exported.graph_signature.inputs_to_lifted_tensor_constants
    kept = {name: v for name, t in lifted.items() if isinstance(v := exported.constants.get(t), FakeTensor)}
    holders, makers = dict[str, fx.Node](), dict[int, fx.Node]()
    for node in exported.graph.nodes:
        if node.name in kept:
            holders[node.name] = node
        elif isinstance(value := node.meta.get("val"), FakeTensor):
            makers.setdefault(storage_of(value), node)
    for name, value in kept.items():
        maker = makers.get(storage_of(value))
        views = None if maker is None else _views_between(maker.meta["val"], value)
        if maker is not None and views is not None:
            _read_instead(holders[name], maker, views, last_of_header(maker))


def _views_between(whole: Tensor, value: Tensor) -> Views | None:
    return views_of(whole.detach(), Layout.of(value)) if value.dtype == whole.dtype else None


def refuse_unknown_values(graph: fx.Graph, constants: Mapping[str, Any], gradient: Where | None) -> None:
    """Raise PlanError if the loss is computed with a constant that was not made in this forward.

    ``gradient``: the line that asks for a gradient inside the forward, if any does.
    """
    for node in graph.find_nodes(op="placeholder"):
        if isinstance(constants.get(node.name), FakeTensor) and node.users:
            if gradient is not None:
                raise PlanError(
                    "a gradient inside the forward reads results that autograd has kept, which export cannot follow",
                    where=gradient,
                    fix="write the gradient with ordinary ops (of tanh: `grad * (1 - y * y)`)",
                )
            raise PlanError(
                "the forward computes with a tensor of an earlier call or of another thread",
                where=where_of(next(iter(node.users))),
                fix="create it inside the forward, or make it a buffer",
            )


def _views(value: Any, owner: Tensor, values: Tensor, fqn: str, holder: fx.Node) -> Views:
    """Return the views that make ``value`` of the model's tensor: of ``owner``, or of the holder of its ``values``."""
    where = where_of(next(iter(holder.users), holder))
    if isinstance(value, FakeTensor):  # the very object: views of it that a forward makes are calls of the graph
        return ()
    if value.dtype != owner.dtype:
        raise PlanError(
            f"the forward reads the memory of {fqn} as {value.dtype}, and precision makes it {owner.dtype}",
            where=where,
            fix="create the view in the forward, or remove precision.parameters",
        )
    views = _views_between(values, value)
    if views is None:
        raise PlanError(
            f"the forward sees the memory of {fqn} in an unsupported way",
            where=where,
            fix="create the view in the forward (`self.weight[…]`, `self.weight.t()`)",
        )
    stopped = owner.requires_grad and not value.requires_grad
    return (*(((aten.detach.default, ()),) if stopped else ()), *views)


def put_in_place(module: fx.GraphModule, held: Mapping[str, HeldTensor], placeholders: Mapping[str, str]) -> None:
    """Replace each held constant (by its placeholder's name) by the model's tensor (by its fqn)."""
    by_name = {n.name: n for n in module.graph.find_nodes(op="placeholder")}
    last = list(by_name.values())[-1]
    for name, what in held.items():
        last = _read_instead(by_name[name], by_name[placeholders[what.fqn]], what.views, last)


def _read_instead(constant: fx.Node, value: fx.Node, views: Views, last: fx.Node) -> fx.Node:
    """Replace ``constant`` by ``views`` of ``value``, inserted after ``last``; return the last of them."""
    reader = next(iter(constant.users), None)
    with constant.graph.inserting_before(last.next):
        seen = seen_through(value, views, origin_of(reader) if reader else {})
    constant.replace_all_uses_with(seen)
    return seen if views else last
