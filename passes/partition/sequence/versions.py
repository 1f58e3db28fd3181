"""The versions of each value that the program of a cp rank needs: one for each type in which it is read.

    cut         computed of cut operands; of a whole value as early as can be, from what it is made of
    whole       computed on every rank
    converted   from another version: gathered, summed over the ranks, sliced, or scaled to a share

So of a mask [s, s] = i ≥ j a rank computes [s/cp, s], of its own i and of every j.

If one row of a program is computed at a time, in order (``one_row``), its types are those of cp with one token on each
rank, from the inputs to the logits. A value that cp gathers (keys and values of attention) is kept: earlier rows of it
were computed before. Values that cp replicates (positions, masks, tables, ids) are known in full, and a row of them is
a slice.

    V(dim)   of each sequence the rows at one position       R   of all positions, computed anew or kept so far
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from passes.errors import PlanError
from passes.partition.loss.scored import Scored
from passes.partition.sequence.facts import Types, op
from passes.partition.sequence.rules import options_over_cp
from passes.partition.sequence.types import gathered_from, types_of
from passes.partition.typings.base import Form, Option, Site
from passes.program.ops.aten import is_random, shape_of
from passes.program.ops.groups import MOVED, Ops
from passes.program.ops.sequence import over_data
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk
from passes.types.types import P, Placement, R

NONE = Ops("")
Made = dict[Placement, Option | Placement]  # type → how it is computed, or the version that is converted


def versions_of(graph: fx.Graph, types: Types, loss: fx.Node) -> dict[fx.Node, Made]:
    """Return the versions of all values that the loss, as partial sums, needs; of a placeholder at least the whole."""
    results = {node: R for node in graph.nodes if node.op == "placeholder"}
    return needed_versions(list(graph.nodes), types, {**results, loss: P})


def needed_versions(
    nodes: Sequence[fx.Node],
    types: Types,
    results: Mapping[fx.Node, Placement],
    given: Set[fx.Node] = frozenset(),
    late: Ops = NONE,
) -> dict[fx.Node, Made]:
    """Of every value of ``nodes``, in their order, that ``results`` are made of. ``given``: values that are there, in
    their own type. ``late``: ops that are computed of whole operands and sliced.
    """
    found: dict[fx.Node, Made] = {node: {} for node in nodes}
    wanted: dict[fx.Node, dict[Placement, None]] = {node: {} for node in nodes}
    for node, placement in results.items():
        wanted[node][placement] = None
    for node in reversed(nodes):
        if node in given:
            found[node] = dict.fromkeys(wanted[node], types.of(node))
            continue
        for version in _with_sources(node, wanted[node], types, found[node], late):
            for operand, placement in zip(node.all_input_nodes, version.args, strict=True):
                wanted[operand][as_version(placement)] = None
    return found


def as_version(placement: Placement) -> Placement:
    """Make R and I one version: a whole value, with partial gradients or complete ones."""
    return R if placement.kind == "I" else placement


def _with_sources(
    node: fx.Node, wanted: dict[Placement, None], types: Types, found: Made, late: Ops
) -> Iterator[Option]:
    """Fill ``found`` with the wanted versions and those that they are converted from; the options of the computed."""
    open_versions = list(wanted)
    for version in open_versions:
        if version in found:
            continue
        found[version] = made = _version(node, version, types, late)
        if isinstance(made, Option):
            yield made
        elif made != version:
            open_versions.append(made)


def _version(node: fx.Node, wanted: Placement, types: Types, late: Ops) -> Option | Placement:
    """Return how a version is computed, or the version that is converted; a placeholder's whole is itself."""
    have = types.of(node)
    if node in types.recut:
        return Option((R,) * len(node.all_input_nodes), R, Form.WHOLE) if wanted == R else R
    if have == wanted and node in types.options:
        return types.options[node]
    if wanted.is_sharded:
        assert have == R, f"{node} is {have}, not {wanted}"
        return (None if node.target in late else _early(node, wanted, types)) or R
    if wanted == P or node.op == "placeholder":
        return R
    if have == P or (have.is_sharded and gathered_from(node, types) is node):
        return have
    args = (P,) if node.target is over_data else (R,) * len(node.all_input_nodes)
    return Option(args, R, Form.WHOLE)


def _early(node: fx.Node, wanted: Placement, types: Types) -> Option | None:
    """How a cut of a whole value follows from cuts of its operands; None if it is computed on every rank and sliced."""
    if node.op != "call_function" or is_random(node):
        return None
    site = Site(node, types.chunks, {node.name: {wanted}})
    for option in options_over_cp(site):
        pairs = [(types.of(n), t) for n, t in zip(site.inputs, option.args, strict=True)]
        if option.out == wanted and all(have == t if t.kind == "P" else have in (R, t) for have, t in pairs):
            return option
    return None


CP = "cp: "
FIX = "nothing: every token runs the whole forward"


@dataclass(frozen=True)
class OneRow:
    """``logits``: of all positions, before the loss moves or casts them; its last dim is the vocabulary. ``dtype``: in
    which the loss reads them. ``needed``: the values that they are made of. ``length``: positions of a sequence."""

    types: Types
    logits: fx.Node
    dtype: torch.dtype
    needed: frozenset[fx.Node]
    length: int

    @property
    def precision(self) -> float:
        """The largest eps of the dtypes in which the logits are computed."""
        dtypes = {
            value.meta["val"].dtype for value in self.types.natives if isinstance(value.meta["val"], torch.Tensor)
        }
        return max((torch.finfo(dtype).eps for dtype in {*dtypes, self.dtype} if dtype.is_floating_point), default=0.0)


def one_row(program: Program, scored: Scored) -> OneRow:
    """Raise PlanError, with the op and its line, if rows of the logits need more than kept rows of earlier values."""
    logits, dtype = _logits_of(program, scored)
    (length,) = {shape_of(program.node(n))[1] for n, key in program.inputs.items() if key == scored.key}
    types = Types(1, length, cuts_again=False)
    try:
        types_of(program, types, {}, [logits])
    except PlanError as error:
        raise PlanError(error.what.removeprefix(CP), where=error.where, fix=FIX) from error
    native = types.of(logits)
    if not native.is_sharded or types.lengths != {length} or native.dim == len(shape_of(logits)) - 1:
        raise refused(logits, "its rows are not those of one sequence")
    return OneRow(types, logits, dtype, frozenset(walk([logits], operands)), length)


def refused(node: fx.Node, why: str) -> PlanError:
    return PlanError(f"{op(node)}: {why}", where=where_of(node), fix=FIX)


def _logits_of(program: Program, scored: Scored) -> tuple[fx.Node, torch.dtype]:
    """Return the logits that all look-ups of the loss move or cast, and the dtype in which they read them."""
    found = set[tuple[fx.Node, torch.dtype]]()
    for pick in scored.picks:
        node = program.node(pick.node).all_input_nodes[0]
        dtype = node.meta["val"].dtype
        while node.target in MOVED:
            node = node.all_input_nodes[0]
        found.add((node, dtype))
    if len(found) != 1 or shape_of(next(iter(found))[0])[-1] != scored.num_classes:
        raise refused(program.node(scored.picks[0].node), "the loss reads several logits, or not all classes of them")
    return found.pop()
