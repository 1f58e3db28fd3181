"""The versions of each value that the program of a cp rank needs: one for each type in which it is read.

    cut         computed of cut operands; of a whole value as early as can be, from what it is made of
    whole       computed on every rank
    converted   from another version: gathered, summed over the ranks, sliced, or scaled to a share

So of a mask [s, s] = i ≥ j a rank computes [s/cp, s], of its own i and of every j.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set

from torch import fx

from passes.partition.options.base import Option, Site
from passes.partition.options.forms import Form
from passes.partition.sequence.facts import Types
from passes.partition.sequence.rules import options_over_cp
from passes.partition.sequence.types import gathered_from
from passes.program.ops.aten import is_random
from passes.program.ops.groups import Ops
from passes.program.ops.over_data import over_data
from passes.types.types import P, Placement, R

NONE = Ops("")
Made = dict[Placement, Option | Placement]  # type → how it is computed, or the version that is converted


def versions_of(graph: fx.Graph, types: Types, loss: fx.Node) -> dict[fx.Node, Made]:
    """Of every value that the loss, as partial sums, is made of; of every placeholder at least the whole."""
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
    """A whole value is one version, with partial gradients or complete ones."""
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
    """How a version is computed, or the version that is converted; a placeholder's whole is itself."""
    have = types.of(node)
    if node in types.recut:
        return Option((R,) * len(node.all_input_nodes), R, Form.WHOLE) if wanted == R else R
    if have == wanted and have != R:
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
        if option.out == wanted and all(_can(types.of(n), t) for n, t in zip(site.inputs, option.args, strict=True)):
            return option
    return None


def _can(have: Placement, wanted: Placement) -> bool:
    return have == wanted if wanted.kind == "P" else have == R or (wanted.is_sharded and have == wanted)
