"""Orders calls that read no weight independently of the order in which Python iterated over a set.

    for kind in set(config.layer_types):              cos, sin and masks of each kind
        tables[kind] = self.rotary(positions, kind)

A set of strings is walked in another order in each process, and its iterations make the same lines of other values.
Within a run of such calls, calls of one line are ordered by their first reader, lines as in the source. Straight code
keeps its traced order. Names follow: the first ``mul`` of a run has its lowest number.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import groupby

from torch import fx

from passes.program.ops.aten import is_random
from passes.program.source_lines import lines_of
from passes.program.walks import in_order, in_turn, readers, walk

_NUMBERED = re.compile(r"(?P<base>.*?)(?:_(?P<number>\d+))?")


def order_side_calls(graph: fx.Graph, weights: Collection[str]) -> None:
    """Bring each run of neighbouring calls that depend on none of ``weights`` into that order."""
    sources = [node for node in graph.nodes if node.name in weights or is_random(node)]
    weighed = set(walk(sources, readers))
    aside = {node for node in graph.nodes if node.op == "call_function" and node not in weighed}
    first_read = _first_read(graph, aside)
    for run in [list(run) for is_aside, run in groupby(graph.nodes, aside.__contains__) if is_aside]:
        # each call after its inputs; else by line, and then by first reader
        keys = {node: (lines_of(node), first_read.get(node, len(first_read))) for node in run}
        order = in_turn({node: [n for n in node.all_input_nodes if n in keys] for node in run}, keys)
        if order != run:
            _place(run, order)


def _first_read(graph: fx.Graph, aside: Collection[fx.Node]) -> dict[fx.Node, int]:
    """Return the place of each call among all, as those with weights ask for them, in the order of their arguments."""
    found: dict[fx.Node, int] = {}
    for reader in graph.nodes:
        if reader not in aside:
            read = [n for n in reader.all_input_nodes if n in aside]
            above = in_order(read, found, step=lambda n: [x for x in n.all_input_nodes if x in aside])
            found |= {node: len(found) + i for i, node in enumerate(above)}
    return found


def _place(run: Sequence[fx.Node], order: Sequence[fx.Node]) -> None:
    before, numbers = run[0].prev, defaultdict[str, list[tuple[int, str]]](list)
    for node in run:
        numbers[_base(node.name)[0]].append((_base(node.name)[1], node.name))
    names = {base: iter(sorted(found)) for base, found in numbers.items()}
    for node in order:
        before.append(node)
        before = node
        node.name = next(names[_base(node.name)[0]])[1]


def _base(name: str) -> tuple[str, int]:
    found = _NUMBERED.fullmatch(name)
    assert found is not None
    return found["base"], int(found["number"] or -1)
