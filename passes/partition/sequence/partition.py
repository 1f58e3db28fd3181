"""partition(graph, types, loss): the program over all tokens becomes that of one rank of cp.

Each needed version of a value becomes a node (versions.py). Then the writer of every axis (passes.partition.writer)
adds conversions between the versions and their readers, and gives each op the form of its typing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from passes.partition.options.base import Option
from passes.partition.options.forms import Form
from passes.partition.sequence.exchanges import converted, resized
from passes.partition.sequence.facts import Types
from passes.partition.sequence.forms import form_over_cp
from passes.partition.sequence.versions import Made, as_version, versions_of
from passes.partition.writer import Scene, convert, rewrite
from passes.program.ops.aten import aten
from passes.types.types import P, Placement, R


@dataclass(frozen=True)
class _Typed:
    """A graph of whole values with a node for each version. ``options``: of ops; ``placements``: of every value."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    options: dict[fx.Node, Option] = field(default_factory=dict)
    placements: dict[fx.Node, Placement] = field(default_factory=dict)


def partition(graph: fx.Graph, types: Types, loss: fx.Node) -> fx.Graph:
    """The graph of one rank; its result is the rank's partial sum of the loss."""
    typed = _typed(graph, types, versions_of(graph, types, loss), loss)
    _convert(typed, types.cp)
    for node in list(typed.graph.nodes):
        made, option = node, typed.options.get(node)
        if option is not None:
            made = _in_its_form(Scene(node, option, types.cp, lambda: types.cp))
        if (placement := typed.placements.get(node)) is not None and placement.is_sharded:
            _become_local(made, placement, types.cp)
    return typed.graph


def _typed(source: fx.Graph, types: Types, versions: Mapping[fx.Node, Made], loss: fx.Node) -> _Typed:
    """Every computed version, in the order of ``source``; readers have the version from which theirs is converted. That
    of its own type keeps a value's name."""
    typed, read = _Typed(), dict[tuple[fx.Node, Placement], fx.Node]()
    for node in source.nodes:
        for version, option in sorted(versions[node].items(), key=lambda made: made[0] != types.of(node)):
            if node.op == "placeholder" and version == R:
                read[node, R] = typed.graph.node_copy(node)
            elif isinstance(option, Option):
                read[node, version] = _copy(typed, node, option, read)
            else:
                continue
            typed.placements[read[node, version]] = version
        for version, have in versions[node].items():
            if not isinstance(have, Option) and (node, version) not in read:
                read[node, version] = read[node, have]
    result = typed.graph.output((read[loss, P],))
    typed.options[result] = Option((P,), P, Form.WHOLE)
    return typed


def _copy(typed: _Typed, node: fx.Node, option: Option, read: Mapping[tuple[fx.Node, Placement], fx.Node]) -> fx.Node:
    wanted = {n: as_version(t) for n, t in zip(node.all_input_nodes, option.args, strict=True)}
    made = typed.graph.node_copy(node, lambda n: read[n, wanted[n]])
    typed.options[made] = option
    return made


def _convert(typed: _Typed, cp: int) -> None:
    """Between the type of a value and the one in which an op, or the result, reads it."""
    readers: dict[tuple[fx.Node, Placement], list[fx.Node]] = {}
    for node, option in typed.options.items():
        for value, placement in zip(node.all_input_nodes, option.args, strict=True):
            if typed.placements[value] != as_version(placement):
                readers.setdefault((value, as_version(placement)), []).append(node)
    for (value, after), of_value in readers.items():
        before = typed.placements[value]
        made = convert(value, of_value, lambda v=value, b=before, a=after: converted(v, b, a, cp))
        made.meta["grad"] &= any(reader.op == "output" or reader.meta["grad"] for reader in of_value)
        typed.placements[made] = after


def _in_its_form(scene: Scene) -> fx.Node:
    if scene.node.op != "call_function":
        return scene.node
    form = form_over_cp(scene)
    if form is None:
        return rewrite(scene, {})
    form(scene)
    return scene.node


def _become_local(node: fx.Node, cut: Placement, cp: int) -> None:
    """The meta value of a rank's part; of a tuple, of each value along the sharded dim."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        node.meta["val"] = resized(value, cut.local_shape(tuple(value.shape), cp))
    else:
        node.meta["val"] = type(value)(resized(v, s) for v, s in zip(value, _shapes(node, cut, cp), strict=True))
    if "draw" in node.meta:
        node.meta["draw"] = replace(node.meta["draw"], cut=cut)


def _shapes(node: fx.Node, cut: Placement, cp: int) -> Iterator[tuple[int, ...]]:
    """Of a split along the cut dim (its sizes are local now), or of values with one size there."""
    arguments: Any = node.args
    is_along = node.target is aten.split_with_sizes.default and arguments[2] == cut.dim
    for place, value in enumerate(node.meta["val"]):
        size = arguments[1][place] if is_along else cut.local_size(cp)
        yield tuple(size if d == cut.dim else n for d, n in enumerate(value.shape))
