"""The facts of a layer of experts, in names of the captured graph, and the error of one that cannot be distributed.

logits[t, E] → chosen[t, k], probs[t, k] → tokens to experts → products with stacks [E, …] → combined[t, h]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from torch import fx

from passes.errors import PlanError, Where
from passes.program.ops.aten import aten, is_random
from passes.program.source_lines import where_of


class Dispatch(StrEnum):
    """How tokens and the matrices of their experts are combined."""

    OFFSETS = "tokens sorted by expert"  # x[t·k, h] in E runs with given ends: none is dropped
    CAPACITY = "slots of each expert"  # x[E, c, h]: tokens without a slot are dropped
    TAKEN = "slots that each expert fills"  # x[E, c, h] of the tokens that an expert likes best
    EVERY_TOKEN = "every token, weighted"  # x[E, t, h], or a loop: computed for all, used for those chosen
    CHOSEN = "the rows that chose it"  # x[rows of e, h]: as many as the routing says
    GATHERED = "matrices of each token"  # W[t, k, h, w] by the ids: none is dropped


@dataclass(frozen=True, slots=True)
class Doubt:
    """A part with a router that was not understood, or not changed: the reason, or the spec's key; the line."""

    why: str
    where: Where | str | None = None


@dataclass(frozen=True, slots=True)
class ExpertWeight:
    """A weight of all experts.

    ``nodes``: one placeholder [.., E, ..] with the experts on ``dim``, or E of them alike (``dim`` is -1).
    ``hidden``, ``width``: its dims of the model's and of an expert's own features; -1: it has none.
    ``style``: how etp would cut ``width``: "column" if a product makes it, "row" if one sums over it, else "".
    """

    nodes: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    hidden: int = -1
    width: int = -1
    style: str = ""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A router and its experts. ``tokens``: the input of both; values added beside ``combined`` are no part of the
    layer. ``top_k``: 0 if experts take tokens; ``chosen`` are those tokens then.
    """

    num_experts: int
    top_k: int
    dispatch: Dispatch
    capacity: int  # slots of an expert for the tokens of a microbatch; 0: no token is dropped
    logits: str
    router: tuple[str, ...]
    chosen: tuple[str, ...]
    probs: tuple[str, ...]
    orders: tuple[str, ...]  # nodes that sort pairs of token and choice by expert
    weights: tuple[ExpertWeight, ...]
    products: tuple[str, ...]
    tokens: str
    combined: str
    tips: tuple[str, ...] = ()  # of experts that are branches: the summands of each
    sent: tuple[str, ...] = ()  # calls that send slots to experts, in an opened graph
    beside: tuple[tuple[str, int], ...] = ()  # of values of all experts that are read beside stacks: (name, dim)
    limit: int = 0  # slots of an expert, if as many are filled as tokens chose it; 0: not known
    dense: Doubt | None = None  # why experts in a loop compute every token; None: they do not, or by the model's code

    @property
    def how(self) -> str:
        """The kind of dispatch, in words."""
        return f"{self.capacity} {self.dispatch}" if self.capacity else str(self.dispatch)


@dataclass(frozen=True, slots=True)
class Asked:
    """The choices of a layer that a step counts, because weights rest if no token chose them: of ``size`` experts, with
    figures from ``start`` on, by the ids in ``chosen``.
    """

    chosen: tuple[str, ...]
    size: int
    start: int


@dataclass(frozen=True, slots=True)
class Experts:
    layers: tuple[ExpertLayer, ...] = ()
    doubts: tuple[Doubt, ...] = ()


# ---- why a layer cannot be distributed

NAMED = "set dropout: layout_invariant for experts in a loop; or "  # its numbers then follow their tokens
Refusal = Callable[[fx.Node, str], PlanError]


def refusal_of(layer: ExpertLayer, fix: str) -> Refusal:
    """The error for a call that is not understood, by its reason."""
    return partial(_refused, layer.num_experts, fix)


def _refused(num_experts: int, fix: str, node: fx.Node, why: str) -> PlanError:
    what = f"these {num_experts} experts cannot be distributed over ep: {why}"
    return PlanError(what, where=where_of(node), fix=f"{fix}, or set mesh.ep: 1")


def check_draws(calls: Iterable[fx.Node], held: str, refusal: Refusal) -> None:
    """Raise if one of the calls on ``held``, rows or slots, draws random numbers."""
    for node in sorted(calls):
        if is_random(node):
            error = refusal(node, f"dropout inside experts draws for {held} that other ranks hold")
            named = "" if "draw" in node.meta or node.target is not aten.dropout.default else NAMED
            raise PlanError(error.what, where=error.where, fix=f"{named}{error.fix}")
