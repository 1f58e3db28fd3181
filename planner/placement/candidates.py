"""The candidate placements of each value: a fixed point over the op rules.

Linears, embeddings and attention propose shardings of their weights and heads; the other rules propagate them one op
forward or backward. A sharding that no rule proposes is never considered, so each value has only a few candidates.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, isqrt

from torch import fx

from passes.moe.domain import axis_of, domain_of
from passes.partition.typings.base import Form
from passes.partition.typings.table import Option, Site, options_of
from passes.rules.rule import OpRule
from passes.types.types import I, Placement, R

MAX_CUTS = 12


@dataclass(frozen=True, slots=True)
class Cutting:
    """The settings of tensor parallelism: sizes ``tp`` and ``etp`` (None: equal to tp), and the spec's tensor_parallel
    section."""

    tp: int
    etp: int | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: bool = False
    vocabulary_multiple: int = 128


class Candidates:
    """The candidate shardings (``cuts``) and ``options`` of each node. ``nodes``: representatives, in graph order."""

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        cutting: Cutting,
        producers: dict[str, list[fx.Node]],
        readers: dict[str, list[fx.Node]],
        seeds: Mapping[str, Placement] | None = None,
    ) -> None:
        self.tp = cutting.tp
        self.sizes = {"tp": cutting.tp, "etp": cutting.etp or cutting.tp}
        self.vocabulary_multiple = cutting.vocabulary_multiple
        self.nodes = [n for n in nodes if n.op in ("placeholder", "call_function")]
        self._rules: dict[str, OpRule | None] = {}  # cached: each node is visited many times
        self._producers = producers  # "reader input" → every node that feeds it (a block's input has several)
        self._readers = readers
        self._feeds: dict[str, set[str]] = defaultdict(set)
        for inner, sources in producers.items():
            for source in sources:
                self._feeds[source.name].add(inner)
        self.cuts: dict[str, set[Placement]] = defaultdict(set)
        self.options: dict[str, list[Option]] = {}
        self._padded_tokens = {(c.segments, c.padding) for c in (seeds or {}).values() if c.padding}
        for node in self.nodes:
            if seeds and node.name in seeds:
                self._add(node, [seeds[node.name]])
        self._settle()

    def _settle(self) -> None:
        queue = deque(self.nodes)
        queued = {n.name for n in queue}
        while queue:
            node = queue.popleft()
            queued.discard(node.name)
            for changed in self._visit(node):
                for other in (changed, *self._readers.get(changed.name, ()), *self._siblings(changed)):
                    if other.name not in queued:
                        queue.append(other)
                        queued.add(other.name)

    def size(self, node: fx.Node) -> int:
        """Return the size of the axis, tp or etp, over which a value is typed."""
        return self.sizes[axis_of(node)]

    def making(self, reader: fx.Node, position: int) -> list[fx.Node]:
        """Return every node that feeds an input of ``reader``; an input of a block has one for each copy."""
        value = reader.all_input_nodes[position]
        return self._producers.get(value.name, [value])

    def reading(self, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """Yield (reader, position) for each input that ``node`` feeds."""
        for reader in self._readers.get(node.name, ()):
            for position in range(len(reader.all_input_nodes)):
                if node in self.making(reader, position):
                    yield reader, position

    def _siblings(self, node: fx.Node) -> list[fx.Node]:
        """Return the calls that feed ``node``: a change at one item of a split concerns the split."""
        feeding = (n for position in range(len(node.all_input_nodes)) for n in self.making(node, position))
        return [n for n in feeding if n.op == "call_function"]

    def _visit(self, node: fx.Node) -> list[fx.Node]:
        """Apply the rule of ``node``; return the nodes with new candidates."""
        if node.op == "placeholder":
            self.options[node.name] = self._of_placeholder(node)
            return []
        site = Site(node, self.size(node), self.cuts, self.vocabulary_multiple, self.sizes, self._rules)
        options = self.options[node.name] = options_of(site)
        grown = [node] if self._add(node, (o.out for o in options)) else []
        for position, value in enumerate(site.inputs):
            wanted = {o.args[position] for o in options}
            for producer in self._producers.get(value.name, [value]):
                if self._add(producer, wanted):
                    grown.append(producer)
                    if producer.op == "placeholder":
                        self.options[producer.name] = self._of_placeholder(producer)
        return grown

    def _add(self, node: fx.Node, placements: Iterable[Placement]) -> bool:
        cuts = self.cuts[node.name]
        before = len(cuts)
        domain = domain_of(node)
        taken = (domain.experts, domain.rows, domain.slots) if domain is not None else ()  # sharded over ep
        for placement in placements:
            if placement.is_sharded and len(cuts) < MAX_CUTS and placement.dim not in taken:
                cuts.add(placement)
        for inner in sorted(self._feeds[node.name]):
            self.cuts[inner] |= cuts
        return len(cuts) > before

    def _of_placeholder(self, node: fx.Node) -> list[Option]:
        """Return the options of a placeholder: for a parameter, each candidate sharding; else replication alone.

        A parameter is not sharded along a padded sequence: zeros as padding would make a norm divide by zero.
        """
        if not node.meta.get("parameter") or self.size(node) == 1:
            return [Option((), I, Form.WHOLE, whole=True)]
        kinds = [I, R] if node.meta.get("grad") else [I]
        cuts = [c for c in sorted(self.cuts[node.name]) if (c.segments, c.padding) not in self._padded_tokens]
        return [Option((), k, Form.WHOLE, whole=True) for k in kinds] + [Option((), c, Form.PARTS) for c in cuts]


def divisors(size: int) -> list[int]:
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def nearest_tp(sizes: Iterable[int], tp: int) -> list[int]:
    """Return the nearest valid tp below and above ``tp``, or ``tp`` itself if valid; 1 is always valid."""
    valid = divisors(gcd(*sizes))
    if tp in valid:
        return [tp]
    return [max(n for n in valid if n < tp), *[n for n in valid if n > tp][:1]]


def uneven_words(shape: Sequence[int], tp: int, before_nearest: str) -> str:
    """Return ``dim 0 = 33 not divisible by tp = 2; nearest valid tp: 1, 3``, or "" if tp divides all dims."""
    uneven = {d: int(n) for d, n in enumerate(shape) if n % tp}
    dims = " and ".join(f"dim {d} = {n}" for d, n in uneven.items())
    return f"{dims} not divisible by tp = {tp}{before_nearest} {nearest_words(uneven.values(), tp)}" if uneven else ""


def nearest_words(sizes: Iterable[int], tp: int) -> str:
    """Return ``nearest valid tp: 1, 3``."""
    return f"nearest valid tp: {', '.join(map(str, nearest_tp(sizes, tp)))}"
