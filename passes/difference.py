"""The changes of each pass, for a reader: removed and added lines, equal ones of repeated blocks once.

insert_collectives   44 → 49 nodes: + 2 collectives.f, + 2 collectives.g, + 1 self.tp; 4 changed
    2 ×  - linear = aten.linear(layer_norm, blocks_0_up_weight)
    2 ×  + f = collectives.f(layer_norm, tp)
    2 ×  + linear = aten.linear(f, blocks_0_up_weight)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from torch import fx

from passes.base import StageGraph, kind_of, text_of


@dataclass(frozen=True, slots=True)
class _Line:
    """A node as text. ``same``: equal for nodes of repeated blocks at the same place."""

    name: str
    kind: str
    text: str
    same: str


@dataclass
class Differences:
    """Is shown a stage's graph after each pass. Owns: how it was before, and the lines to print."""

    representative: Mapping[str, str]
    before: tuple[_Line, ...] | None = None
    lines: list[str] = field(default_factory=list)

    def seen(self, name: str, stage: StageGraph) -> None:
        after = tuple(map(self._line, stage.graph.nodes))
        if self.before is None:
            self.lines.append(f"  {name:<20} {len(after)} nodes")
        else:
            self.lines.append(f"  {name:<20} {_summary(self.before, after)}")
            self.lines += _folded(_changes(self.before, after))
        self.before = after

    def _line(self, node: fx.Node) -> _Line:
        return _Line(node.name, kind_of(node), text_of(node), text_of(node, self._place))

    def _place(self, node: fx.Node) -> str:
        origin = node.meta.get("origin", "")
        return f"{kind_of(node)}@{self.representative.get(origin, origin)}"


def _summary(before: tuple[_Line, ...], after: tuple[_Line, ...]) -> str:
    """How many nodes there are, which kinds came and went, and how many calls have other arguments."""
    came, went = Counter(line.kind for line in after), Counter(line.kind for line in before)
    kinds = dict.fromkeys(line.kind for line in (*after, *before))
    counts = [f"{'+' if n > 0 else '−'} {abs(n)} {kind}" for kind in kinds if (n := came[kind] - went[kind])]
    was = {line.name: line for line in before}
    changed = sum(line.name in was and line.text != was[line.name].text for line in after)
    told = "; ".join(part for part in (", ".join(counts), f"{changed} changed" if changed else "") if part)
    return f"{len(before)} → {len(after)} nodes: {told or 'nothing changed'}"


def _changes(before: tuple[_Line, ...], after: tuple[_Line, ...]) -> Iterator[tuple[str, _Line]]:
    """Lines that went (−) and came (+), in the order of the graph."""
    matcher = SequenceMatcher(None, [x.text for x in before], [x.text for x in after], autojunk=False)
    for what, a, b, c, d in matcher.get_opcodes():
        if what != "equal":
            yield from (("-", line) for line in before[a:b])
            yield from (("+", line) for line in after[c:d])


def _folded(changes: Iterator[tuple[str, _Line]]) -> Iterator[str]:
    """The first of lines that say the same of repeated blocks, with their number."""
    found: dict[tuple[str, str], list[str]] = {}
    for sign, line in changes:
        found.setdefault((sign, line.same), []).append(line.text)
    for (sign, _), texts in found.items():
        times = f"{len(texts)} ×" if len(texts) > 1 else ""
        yield f"    {times:>6}  {sign} {texts[0]}"
