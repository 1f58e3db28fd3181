"""sort_plainly(program, layer): what a layer computes to sort its rows by expert becomes a few known calls.

A model may find the order of its rows in any way. What equals one of these for random choices is replaced by it:

    order   sort(choices)     pairs of token and choice, by expert       expert   choices[order]
    token   order // k        the token of each of them                  counts   of the rows of each expert
    places  sort(order)       the place of each pair in the order        ends     cumsum(counts)

Over cp each rank sorts its own pairs (passes.partition.sequence.sorted_rows): these calls, and no others, may be
computed of a rank's pairs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, fx

from passes.moe.domain import Builder, erase_unread
from passes.moe.layers import Dispatch, Experts
from passes.moe.opening import Exchange
from passes.moe.routing import Routing
from passes.program.ops.aten import aten
from passes.program.program import Program
from passes.program.walks import readers, walk


@dataclass(frozen=True)
class Sorted:
    """The known calls of all layers: ``pairs`` and ``tokens`` count rows before they are sorted, ``places`` after it;
    ``ids`` are rows that are sorted."""

    sorts: set[fx.Node] = field(default_factory=set)
    pairs: set[fx.Node] = field(default_factory=set)
    tokens: set[fx.Node] = field(default_factory=set)
    places: set[fx.Node] = field(default_factory=set)
    ids: set[fx.Node] = field(default_factory=set)


def sort_plainly(program: Program, experts: Experts) -> Sorted:
    """Rewrite ``program`` at each layer with rows that are sorted by expert."""
    found = Sorted()
    for layer in experts.layers:
        routing = Routing(layer.num_experts, [program.node(name) for name in layer.chosen])
        if layer.dispatch is Dispatch.OFFSETS and len(routing.chosen) == 1:
            _Layer(program, routing, program.node(layer.combined), found).rewrite()
    program.graph_changed()
    return found


class _Layer:
    """Owns the known calls of one layer, each of which is made when it is wanted."""

    def __init__(self, program: Program, routing: Routing, combined: fx.Node, found: Sorted) -> None:
        self.graph, self.routing, self.found = program.graph.graph, routing, found
        (self.chosen,) = routing.chosen
        self.combined = combined
        self.build = Builder(self.graph, self.chosen.next, self.chosen)
        self.rows = Exchange(self.build, routing)
        self.made: dict[tuple[str, torch.dtype], fx.Node] = {}

    def rewrite(self) -> None:
        """Of values that depend on the choices alone, the known ones."""
        names, order = dict[fx.Node, str](), self.chosen
        for node in sorted(walk([self.chosen], readers, into=lambda n: n <= self.combined)):
            name = self._name_of(node, order)
            if name:
                names[node] = name
                order = node if name == "order" and order is self.chosen else order
        for node, name in names.items():
            node.replace_all_uses_with(self._as(name, node.meta["val"].dtype))
        self._note()
        erase_unread(self.graph, names)

    def _name_of(self, node: fx.Node, order: fx.Node) -> str:
        """``order``: that of the rows; the choices, while it is not known."""
        value = node.meta.get("val")
        sizes = {(self.routing.num_rows,), (self.routing.size,)}
        if node is self.chosen or not isinstance(value, Tensor) or tuple(value.shape) not in sizes:
            return ""
        if node.meta.get("grad"):
            return ""
        facts = WITHOUT_ORDER if order is self.chosen else WITH_ORDER
        left = list(facts)

        def holds(found: list[Tensor], counts: Tensor, ids: list[Tensor]) -> bool:
            trial = Trial(found[0].long(), ids[0].reshape(-1), counts, found[1].reshape(-1), self.routing.top_k)
            left[:] = [name for name in left if facts[name](trial)]
            return bool(left)

        return left[0] if self.routing.holds([node, order], holds) else ""

    def _as(self, name: str, dtype: torch.dtype) -> fx.Node:
        node = self._ends if name == "ends" else getattr(self.rows, name)
        if node.meta["val"].dtype == dtype:
            return node
        if (name, dtype) not in self.made:
            self.made[name, dtype] = self.build.call(aten.to.dtype, node, dtype)
        return self.made[name, dtype]

    @cached_property
    def _ends(self) -> fx.Node:
        return self.build.call(aten.cumsum.default, self.rows.counts, 0)

    def _note(self) -> None:
        """What was made."""
        made = vars(self.rows)
        for name, kind in (("order", "pairs"), ("token", "tokens"), ("places", "places"), ("expert", "ids")):
            getattr(self.found, kind).update({made[name]} if name in made else ())
        for name in ("order", "places"):
            self.found.sorts.update(made[name].all_input_nodes if name in made else ())


class Trial(NamedTuple):
    """A value for random choices, and what it may be: ``flat`` choices, ``counts`` of the rows of each expert, and the
    model's own ``order`` of the rows, in which those of one expert may stand in any order."""

    value: Tensor
    flat: Tensor
    counts: Tensor
    order: Tensor
    top_k: int


def _sorts(trial: Trial) -> bool:
    """Whether it is an order of all rows, by expert."""
    value, flat = trial.value, trial.flat
    if value.shape != flat.shape or not torch.equal(_sorted(value), torch.arange(len(flat))):
        return False
    return torch.equal(flat[value], _sorted(flat))


def _sorted(values: Tensor) -> Tensor:
    return torch.sort(values).values


Facts = Mapping[str, Callable[[Trial], bool]]
OF_COUNTS: Facts = {
    "expert": lambda trial: torch.equal(trial.value, _sorted(trial.flat)),
    "counts": lambda trial: torch.equal(trial.value, trial.counts),
    "ends": lambda trial: torch.equal(trial.value, trial.counts.cumsum(0)),
}
OF_THE_ORDER: Facts = {
    "order": lambda trial: torch.equal(trial.value, trial.order),
    "token": lambda trial: torch.equal(trial.value, trial.order // trial.top_k),
    "places": lambda trial: torch.equal(trial.value, torch.argsort(trial.order)),
}
WITHOUT_ORDER: Facts = {"order": _sorts} | OF_COUNTS
WITH_ORDER: Facts = OF_THE_ORDER | OF_COUNTS
