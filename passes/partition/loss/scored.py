"""The values of a loss that hold each target's probability: found by the meaning of the ops, for any use in the loss.

    cross_entropy(z, t), nll_loss(log_softmax(z), t)      log P(t) = z[t] − log Σ exp(z)
    logsumexp(z) − z.gather(−1, t)                        the same
    (z − logsumexp(z)).gather(−1, t)                      the same: subtracting a constant from a row changes nothing

Class weights, label smoothing, masks and further terms belong to the loss, not to a probability.

The places of a target's elements in the batch tensor from which they were taken: ops that move elements run on places
as they run on values, and an element that they fill in has no place, -1. Ops on single elements, such as a clamp that
turns an ignored label into a real one, leave places unchanged.

    labels                        [[a, b, c]]      places [[0, 1, 2]]
    pad(labels, [0, 1])[:, 1:]    [[b, c, fill]]   places [[1, 2, -1]]
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any, Protocol

import torch
from torch import fx

from passes.errors import PlanError
from passes.partition.type_changes import Placements
from passes.program.ops.aten import (
    aten,
    has_gradient,
    is_pointwise,
    named,
    packet_of,
    position_of,
    reduced_dims,
    shape_of,
    tensors_of,
)
from passes.program.ops.groups import CASTS, COPIES, CROSS_ENTROPIES, JOINS, LOG_SOFTMAXES, MOVED, PADS, SPLITS, Ops
from passes.program.ops.sequence import local_rows
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk


@dataclass(frozen=True, slots=True)
class Pick:
    """One call that looks up targets among classes. ``target``: the position of the targets among its arguments.

    ``class_dim``: of its first argument. ``ignored``: the target that the loss skips.
    """

    node: str
    target: int
    class_dim: int
    num_classes: int
    ignored: int


@dataclass(frozen=True, slots=True)
class Scored:
    """``key``: the batch tensor with the targets as elements. ``picks``: each looks up a part of them."""

    key: str
    num_classes: int
    picks: tuple[Pick, ...]


def find_scored(program: Program) -> Scored:
    """Return the cross-entropy over the vocabulary: of several, as a model with two tasks has, that over most classes.

    Raises PlanError, by line, if the loss is none, and if a target cannot be traced to its label.
    """
    found: dict[tuple[str, int], list[Pick]] = {}
    for pick, key in _picks(program):
        found.setdefault((key, pick.num_classes), []).append(pick)
    if not found:
        raise PlanError(
            "the loss is not a cross-entropy over a vocabulary: it assigns no probability to a target",
            where=where_of(program.node(program.loss)),
            fix="use a model with the loss cross_entropy(logits, targets), nll_loss of a log_softmax, or logsumexp "
            "minus the target's logit",
        )
    most = max(num_classes for _, num_classes in found)
    widest = [(key, picks) for (key, num_classes), picks in found.items() if num_classes == most]
    if len(widest) > 1:
        told = ", ".join(repr(key) for key, _ in widest)
        what = f"the loss has cross-entropies over {most} classes for several inputs: {told}"
        where = where_of(program.node(widest[1][1][0].node))
        raise PlanError(what, where=where, fix="use a model that predicts one of them")
    ((key, picks),) = widest
    return Scored(key, most, tuple(picks))


def read_by_the_loss_alone(program: Program, scored: Scored) -> list[str]:
    """Trained parameters that no gradient of the scored probabilities reaches, such as those of a second head."""
    logits: list[Any] = [program.node(pick.node).args[0] for pick in scored.picks]
    reached = set(walk(logits, operands, into=lambda node: bool(node.meta.get("grad"))))
    nodes = {name: program.node(node) for node, name in program.parameters.items()}
    return [name for name, node in nodes.items() if node.meta.get("grad") and node not in reached]


def _picks(program: Program) -> Iterator[tuple[Pick, str]]:
    for node in program.graph.graph.nodes:
        found = _pick(node) if node.op == "call_function" else None
        if found is not None:
            key = _key_of(program, node.args[found.target])  # pyright: ignore[reportArgumentType]
            if key is not None:
                yield found, key


def _pick(node: fx.Node) -> Pick | None:
    if node.target in CROSS_ENTROPIES:
        given = named(node)
        x, target = given["self"], given["target"]
        if target.meta["val"].is_floating_point():
            return None
        if packet_of(node.target) is not aten.cross_entropy_loss and not _is_normalised(x, _class_dim(x)):
            return None
        return Pick(node.name, 1, _class_dim(x), shape_of(x)[_class_dim(x)], int(given["ignore_index"]))
    if node.target is aten.gather.default:
        args: Any = node.args
        x, index, dim = args[0], args[2], int(args[1]) % max(1, len(shape_of(args[0])))
        is_one_each = shape_of(index) == (*shape_of(x)[:dim], 1, *shape_of(x)[dim + 1 :])
        if is_one_each and (_is_normalised(x, dim) or _is_read_by_logsumexp(x, dim)):
            return Pick(node.name, 2, dim, shape_of(x)[dim], -1)
    return None


def _class_dim(logits: fx.Node) -> int:
    return 1 if len(shape_of(logits)) > 1 else 0


def _before_casts(node: fx.Node) -> fx.Node:
    while node.target in CASTS | COPIES:
        node = node.all_input_nodes[0]
    return node


def _is_normalised(x: fx.Node, dim: int) -> bool:
    """Return whether the exponentials of ``x`` along ``dim`` add up to one."""
    x = _before_casts(x)
    if x.target in LOG_SOFTMAXES:
        return reduced_dims(x) == {dim}
    if packet_of(x.target) not in (aten.sub, aten.subtract) or len(x.all_input_nodes) != 2 or x.kwargs:
        return False
    z, total = (_before_casts(n) for n in x.all_input_nodes)
    return _is_logsumexp(total, z, dim) and len(shape_of(total)) == len(shape_of(z))


def _is_read_by_logsumexp(x: fx.Node, dim: int) -> bool:
    """Return whether the targets' logits are normalised by the logsumexp of the same values."""
    z = _before_casts(x)
    readers: list[Any] = [z, *(user for user in z.users if user.target in CASTS | COPIES)]
    return any(_is_logsumexp(user, z, dim) for node in readers for user in node.users)


def _is_logsumexp(node: fx.Node, z: fx.Node, dim: int) -> bool:
    is_one = node.target is aten.logsumexp.default and _before_casts(node.all_input_nodes[0]) is z
    return is_one and reduced_dims(node) == {dim}


def _key_of(program: Program, target: fx.Node) -> str | None:
    """Return the batch tensor that the targets are elements of; None if they are of no integer input."""

    def source(node: fx.Node) -> object:
        return node if node.name in program.inputs else None

    writer = PlaceWriter(source, lambda like, target, args, kwargs: like)
    if writer.places(target) is None:
        return None
    if len(writer.sources) > 1:
        names = " and ".join(repr(program.inputs[n.name]) for n in writer.sources)
        what = f"the targets of the loss are taken from several inputs: {names}"
        raise PlanError(what, where=where_of(target), fix="use a model with targets from the labels of one input")
    (found,) = writer.sources
    return program.inputs[found.name]


def is_over_classes(placements: Placements, reader: fx.Node, pick: Pick) -> bool:
    """Return whether the logits that ``reader`` looks ``pick`` up in are sharded over the vocabulary."""
    cut = placements.wanted(reader, 0)
    return placements.tp > 1 and cut.is_sharded and cut.dim == pick.class_dim


NOWHERE = -1
MOVES = MOVED | SPLITS | PADS | JOINS | Ops("stack slice_scatter select_scatter repeat roll flip", [local_rows])


class Emit(Protocol):
    """Adds a call; returns a handle of its result."""

    def __call__(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PlaceWriter:
    """Writes the calls that compute places. Owns the calls that it has written, and the batch tensors that it reached.

    ``source``: the places of a batch tensor's own elements; None for any other placeholder or attribute. ``moves``:
    further ops that move elements, beside MOVES.
    """

    def __init__(self, source: Callable[[fx.Node], Any], emit: Emit, moves: Collection[Any] = ()) -> None:
        self.source, self.emit, self.moves = source, emit, MOVES | Ops("", moves)
        self.sources: dict[fx.Node, None] = {}
        self._written: dict[fx.Node, Any] = {}

    def places(self, node: fx.Node) -> Any:
        """Return the places of the elements of ``node``; None if none of them is of the batch.

        Raises PlanError at the line of a call that makes other integers of the batch's.
        """
        if node not in self._written:
            if node.op == "call_function":
                self._written[node] = self._of_call(node)
            elif (found := self.source(node)) is not None:
                self._written[node], self.sources[node] = found, None
        return self._written.get(node)

    def _of_call(self, node: fx.Node) -> Any:
        given = {n: self.places(n) for n in node.all_input_nodes if is_integer(n)}
        held = {n: found for n, found in given.items() if found is not None}
        if not held:
            return None
        if is_pointwise(node.target) and len(held) == 1 and is_integer(node):
            (value,) = held
            if shape_of(value) == shape_of(node):
                return held[value]
        if node.target in self.moves or node.target in (aten.where.self, getitem):
            return self._moved(node, held)
        fix = "pass the batch's labels to the loss: only shifted, sliced, padded or concatenated"
        raise PlanError("the label of each target cannot be traced through this call", where=where_of(node), fix=fix)

    def _moved(self, node: fx.Node, held: dict[fx.Node, Any]) -> Any:
        args, kwargs = node.args, dict(node.kwargs)
        if node.target in PADS:  # filled with elements without a place
            place = position_of(node.target, "value")
            kwargs.pop("value", None)
            if len(args) >= place:
                args = (*args[:place], NOWHERE)
            else:
                kwargs["value"] = NOWHERE
        new_args, new_kwargs = fx.map_arg((args, kwargs), lambda n: held.get(n) or self._beside(node, n))  # pyright: ignore
        return self.emit(node, node.target, new_args, new_kwargs)

    def _beside(self, node: fx.Node, operand: fx.Node) -> Any:
        """Return the places of an operand that holds none of the batch: NOWHERE if it is joined with others; else the
        operand itself."""
        others = (aten.stack, aten.slice_scatter, aten.select_scatter, aten.where)
        is_joined = node.target in JOINS or packet_of(node.target) in others
        if not is_joined or not is_integer(operand):
            return operand
        return self.emit(operand, aten.full_like.default, (operand, NOWHERE), {})


def is_integer(node: fx.Node) -> bool:
    """Return whether a value is integers, also a list of integer tensors, as a split makes it."""
    tensors = list(tensors_of(node))
    return bool(tensors) and not any(has_gradient(v.dtype) or v.dtype == torch.bool for v in tensors)
