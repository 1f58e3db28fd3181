"""The facts of a layer of experts, in names of the captured graph, and the error of one that cannot be distributed.

logits[t, E] → chosen[t, k], probs[t, k] → tokens to experts → products with stacks [E, …] → combined[t, h]

A step does not update weights of experts that no token of the global batch chose, if the model asks for these tokens:

    for e, expert in enumerate(experts):
        token, choice = torch.where(chosen == e)
        if token.numel() == 0: continue          # nobody asks for the gradient of expert e: it is None, no update

With stacks, and without the question, one process has a gradient of zeros there, and updates by it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import fx

from passes.errors import PlanError, Where
from passes.program.ops.aten import aten, is_random
from passes.program.program import Program


class Dispatch(StrEnum):
    """The ways in which tokens and the matrices of their experts are combined."""

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
    ``width``: its dim of an expert's own features, which etp cuts; -1: it has none.
    """

    nodes: tuple[str, ...]
    shape: tuple[int, ...]
    dim: int
    width: int = -1


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


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A parameter of ``num_experts`` experts: stacked on ``dim``, or (``dim`` is -1) of expert ``number`` alone.

    stack    [.., E, ..] → [.., E / ep, ..]      ep rank r has experts r·E/ep … (r + 1)·E/ep
    alone    of expert e: complete on ep rank e // (E / ep), absent on others
    """

    num_experts: int
    dim: int = -1
    number: int = -1

    def first(self, ep: int, ep_rank: int) -> int:
        """Return the first expert of an ep rank."""
        return ep_rank * (self.num_experts // ep)

    def is_held(self, ep: int, ep_rank: int) -> bool:
        """Return whether an ep rank has any of it."""
        return self.dim >= 0 or self.owner(ep) == ep_rank

    def owner(self, ep: int) -> int:
        """Return the ep rank that holds the parameter of one expert alone."""
        return self.number // (self.num_experts // ep)

    def local_shape(self, shape: tuple[int, ...], ep: int) -> tuple[int, ...]:
        """Return the part of ``shape`` on a rank that holds it."""
        return tuple(n // ep if d == self.dim else n for d, n in enumerate(shape))


def expert_parts(experts: Experts) -> dict[str, ExpertPart]:
    """Return placeholder of a parameter → its part in the experts of its layer; nothing for all other parameters."""
    return {
        name: ExpertPart(layer.num_experts, weight.dim, -1 if weight.dim >= 0 else number)
        for layer in experts.layers
        for weight in layer.weights
        for number, name in enumerate(weight.nodes)
    }


# ---- why a layer cannot be distributed

NAMED = "set dropout: layout_invariant for experts in a loop; or "  # its numbers then follow their tokens
Refusal = Callable[[fx.Node, str], PlanError]


def check_draws(calls: Iterable[fx.Node], held: str, refusal: Refusal) -> None:
    """Raise if one of the calls on ``held``, rows or slots, draws random numbers."""
    for node in sorted(calls):
        if is_random(node):
            error = refusal(node, f"dropout inside experts draws for {held} that other ranks hold")
            named = "" if "draw" in node.meta or node.target is not aten.dropout.default else NAMED
            raise PlanError(error.what, where=error.where, fix=f"{named}{error.fix}")


# ---- weights that rest


def asked_of(program: Program, experts: Experts) -> tuple[Asked, ...]:
    """Return the layers with choices that a step counts, with their places among its figures."""
    return tuple(asked for asked, _ in _skipped(program, experts))


def resting(program: Program, experts: Experts) -> Mapping[str, tuple[int, ...]]:
    """Return parameter, by dotted name → the figures of a step: it rests if all of them are zero."""
    found: dict[str, tuple[int, ...]] = {}
    for asked, names in _skipped(program, experts):
        for number, fqn in names:
            found[fqn] = (*found.get(fqn, ()), asked.start + number)
    return found


def _skipped(program: Program, experts: Experts) -> Iterator[tuple[Asked, list[tuple[int, str]]]]:
    """Yield the choices of each layer with weights of one expert alone that a step may skip, (number, name) of each."""
    start = 0
    for layer in experts.layers:
        alone = (enumerate(map(program.parameters.get, weight.nodes)) for weight in layer.weights if weight.dim < 0)
        if names := [(number, fqn) for own in alone for number, fqn in own if fqn in program.skipped]:
            yield Asked(layer.chosen, layer.num_experts, start), names  # pyright: ignore[reportReturnType]
            start += layer.num_experts
