"""Is attention sharded over tp? Found by structure: products of two activations around a softmax, and their inputs.

An attention site is one kind of such products in one module: sdpa, or the two products written by hand. Its heads are
the dims that both operands and the result share, the batch aside. If heads do not divide by tp, the solver leaves a
site replicated. The plan reports it: as an error if no site of the model is sharded (unless an override asks for that),
else as a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from passes.blocks.blocks import Blocks
from passes.blocks.places import glob_of
from passes.errors import PlanError
from passes.partition.placements import Placements
from passes.program.ops.groups import ATTENTION
from passes.program.ops.products import PRODUCTS, equation
from passes.program.program import Program
from passes.program.source_lines import module_of, where_of
from passes.program.walks import operands, walk
from passes.program.weights import matrices_read
from planner.placement.attention.scores import has_scores, is_product_of_activations
from planner.placement.divisibility import nearest_tp, nearest_words

aten = torch.ops.aten
_MAX_WALK = 400  # nodes between a projection and its attention: far fewer in any model


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """Attention of one kind: its products, query and key heads (0 without such a dim), its input projections.

    ``feeders``: names of the weights that project into its operands, in the first block of the kind.
    """

    nodes: tuple[fx.Node, ...]
    heads: int
    groups: int
    is_cut: bool
    feeders: tuple[str, ...]

    @property
    def head_size(self) -> int:
        """Elements of one query head."""
        return int(self.node.all_input_nodes[0].meta["val"].shape[-1])

    @property
    def node(self) -> fx.Node:
        return self.nodes[0]

    def divides(self, tp: int) -> bool:
        return self.heads == 0 or self.heads % tp == 0

    def why_whole(self, tp: int) -> str:
        """``3 heads are not divisible by tp = 2; nearest valid tp: 1, 3``."""
        if self.divides(tp):
            if not self.heads:
                return "it has no dim of heads that a rule could shard"
            return f"no rule propagates sharding of its {count(self.heads, 'head')} through to its operands"
        return (
            f"{self.words('head')} {'is' if self.heads == 1 else 'are'} not divisible by tp = {tp}; "
            f"{nearest_words([self.heads], tp)}"
        )

    def words(self, noun: str) -> str:
        """``6 heads (2 key heads)``."""
        keys = f" ({count(self.groups, 'key head')})" if self.groups not in (0, self.heads) else ""
        return count(self.heads, noun) + keys


def count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def attention_sites(program: Program, blocks: Blocks, placements: Placements) -> tuple[AttentionSite, ...]:
    """Every site, one for each kind of block, in graph order."""
    groups: dict[tuple[str, int], list[fx.Node]] = {}
    for node in program.graph.graph.nodes:
        if blocks.representative.get(node.name) == node.name and is_attention(node):
            groups.setdefault((module_of(node), head_counts(node)[0]), []).append(node)
    return tuple(_site(placements, nodes) for nodes in groups.values())


def _site(placements: Placements, nodes: list[fx.Node]) -> AttentionSite:
    heads, groups = head_counts(nodes[0])
    is_cut = any(not placements.options[n.name].whole for n in nodes)
    feeders = dict.fromkeys(w.name for n in nodes for operand in _operands(n) for w in _weights_behind(operand))
    return AttentionSite(tuple(nodes), heads, groups, is_cut, tuple(feeders))


def is_attention(node: fx.Node) -> bool:
    """The fused op, or one of the two products on both sides of a softmax over scores."""
    if node.op != "call_function" or not node.meta.get("grad"):
        return False
    if node.target in ATTENTION:
        return True
    return is_product_of_activations(node) and has_scores(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The queries, keys and values of sdpa; both sides of a product."""
    if node.target in ATTENTION:
        return [n for n in node.args[:3] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def head_counts(node: fx.Node) -> tuple[int, int]:
    """(query heads, key heads) of an attention product; 0 if the operands have no such dim."""
    if node.target in ATTENTION:
        return _heads_of_shape(_operands(node)[0]), _heads_of_shape(_operands(node)[1])
    if node.target is aten.einsum.default:
        found = equation(node)
        if found is None:
            return 0, 0
        operands, words, out = found
        shared = [c for c in words[0] if c != words[0][0] and c in out and all(c in word for word in words)]
        heads = prod(int(operands[0].meta["val"].shape[words[0].index(c)]) for c in shared) if shared else 0
        return heads, heads
    return _heads_of_shape(_operands(node)[0]), _heads_of_shape(_operands(node)[-1])


def _heads_of_shape(node: fx.Node) -> int:
    """[b, heads, s, d] → heads, also if batch and heads were merged into one dim for a bmm."""
    for _ in range(8):
        shape = getattr(node.meta["val"], "shape", ())
        if len(shape) >= 4:
            return prod(int(n) for n in shape[1:-2])
        if node.op != "call_function" or not node.all_input_nodes:
            return 0
        node = node.all_input_nodes[0]
    return 0


def _weights_behind(start: fx.Node) -> Iterator[fx.Node]:
    """The weights of the projections that a value is made of."""
    for node in walk([start], operands, into=_is_activation, stop=lambda n: bool(_matrices_of(n)), most=_MAX_WALK):
        yield from _matrices_of(node)


def _is_activation(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("grad")) and not is_attention(node)


def _matrices_of(node: fx.Node) -> list[fx.Node]:
    """The matrices that a product multiplies by."""
    return matrices_read(node) if node.target in PRODUCTS else []


def is_overridden(placements: Placements, site: AttentionSite) -> bool:
    """Whether the spec asks for a weight of this attention in one style."""
    return any(placements.origins[name].startswith("override") for name in site.feeders)


def check_attention(program: Program, placements: Placements, sites: tuple[AttentionSite, ...]) -> None:
    """Raise PlanError if tp > 1 and no attention of the model can be sharded, unless overrides replicate it."""
    tp = placements.tp
    refused = [s for s in sites if not s.divides(tp)]
    if tp == 1 or not refused or any(s.is_cut or is_overridden(placements, s) for s in sites):
        return
    site = refused[0]
    globs = dict.fromkeys(glob_of(program.parameters[name].rpartition(".")[0]) for name in site.feeders)
    listed = ", ".join(f'"{g}": replicate' for g in globs)
    choice = "{" + ", ".join(map(str, nearest_tp([s.heads for s in refused], tp))) + "}"
    raise PlanError(
        f"attention: {site.words('query head')} not divisible by tp = {tp}",
        where=where_of(site.node),
        fix=f"choose tp from {choice}, or set tensor_parallel.overrides: {{{listed}}} to replicate it",
    )
