"""The candidate placements of each value: rules are asked until they name no new one.

Linears, embeddings and attention seed cuts of their weights and heads; every other rule carries them one step, forward
or backward. A cut that no rule names is never considered, so a block of 80 nodes has a handful of cuts a value.
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
    """By what a model is cut: over ``tp`` ranks, its experts over ``etp`` (None: tp), as the spec's tensor_parallel
    says."""

    tp: int
    etp: int | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: bool = False
    vocabulary_multiple: int = 128


class Candidates:
    """Owns, for each node under discussion, its cuts and its options. ``nodes`` are representatives, in graph order."""

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
        self._rules: dict[str, OpRule | None] = {}  # nodes are visited again and again
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
        """Ranks over which a value is typed."""
        return self.sizes[axis_of(node)]

    def making(self, reader: fx.Node, position: int) -> list[fx.Node]:
        """Every node that feeds an input of ``reader``: for a block's input, the nodes before any of its copies."""
        value = reader.all_input_nodes[position]
        return self._producers.get(value.name, [value])

    def reading(self, node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
        """(reader of ``node``, position among the reader's inputs)."""
        for reader in self._readers.get(node.name, ()):
            for position in range(len(reader.all_input_nodes)):
                if node in self.making(reader, position):
                    yield reader, position

    def _siblings(self, node: fx.Node) -> list[fx.Node]:
        """The split, or the tensor, with pieces that share candidates."""
        found = (n for position in range(len(node.all_input_nodes)) for n in self.making(node, position))
        return [n for n in found if n.op == "call_function"]

    def _visit(self, node: fx.Node) -> list[fx.Node]:
        """Ask the rule of ``node``; returns the nodes with new candidates."""
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
        taken = (domain.experts, domain.rows, domain.slots) if domain is not None else ()  # ep cuts those
        for placement in placements:
            if placement.is_sharded and len(cuts) < MAX_CUTS and placement.dim not in taken:
                cuts.add(placement)
        for inner in sorted(self._feeds[node.name]):
            self.cuts[inner] |= cuts
        return len(cuts) > before

    def _of_placeholder(self, node: fx.Node) -> list[Option]:
        """A parameter may be held in any type that a reader wants; all else is the same on every rank.

        But not along a padded sequence: its padding would be zeros, which a norm divides by, and no copy of a token.
        """
        if not node.meta.get("parameter") or self.size(node) == 1:
            return [Option((), I, Form.WHOLE, whole=True)]
        kinds = [I, R] if node.meta.get("grad") else [I]
        held = [c for c in sorted(self.cuts[node.name]) if (c.segments, c.padding) not in self._padded_tokens]
        return [Option((), k, Form.WHOLE, whole=True) for k in kinds] + [Option((), c, Form.PARTS) for c in held]


def divisors(size: int) -> list[int]:
    small = [n for n in range(1, isqrt(size) + 1) if size % n == 0]
    return sorted({*small, *(size // n for n in small)})


def nearest_tp(sizes: Iterable[int], tp: int) -> list[int]:
    """The nearest valid tp below and above ``tp`` (itself if it is valid); 1 is always valid."""
    valid = divisors(gcd(*sizes))
    if tp in valid:
        return [tp]
    return [max(n for n in valid if n < tp), *[n for n in valid if n > tp][:1]]


def uneven_words(shape: Sequence[int], tp: int, before_nearest: str) -> str:
    """``dim 0 = 33 not divisible by tp = 2; nearest valid tp: 1, 3``; empty if tp divides all dims."""
    uneven = {d: int(n) for d, n in enumerate(shape) if n % tp}
    dims = " and ".join(f"dim {d} = {n}" for d, n in uneven.items())
    return f"{dims} not divisible by tp = {tp}{before_nearest} {nearest_words(uneven.values(), tp)}" if uneven else ""


def nearest_words(sizes: Iterable[int], tp: int) -> str:
    """``nearest valid tp: 1, 3``."""
    return f"nearest valid tp: {', '.join(map(str, nearest_tp(sizes, tp)))}"
