"""The reason for a parameter's sharding in words: the op that reads it, and the purpose or the obstacle."""

import operator
from collections.abc import Iterator
from itertools import chain

import torch
from torch import fx

from passes.partition.typings.base import Form
from passes.partition.typings.products import ROW_BYTES
from passes.partition.typings.table import rule_of
from passes.program.ops.aten import packet_of
from passes.program.ops.groups import PRODUCTS, SEE_THROUGH
from passes.program.weights import is_weight
from passes.rules.flops import has_flops
from passes.rules.table import equation
from passes.types.types import Placement
from planner.decisions import Decisions
from planner.placement.attention import AttentionSite, count, is_attention, is_overridden
from planner.placement.candidates import uneven_words
from planner.recompute.decide import op_name

aten = torch.ops.aten
_MAX_WALK = 300
OF_VOCABULARY = {Form.VOCABULARY, Form.CLASSES}


def summed(axis: str) -> str:
    return f"gradients are summed over {axis} once per step"


class Reasons:
    """Writes the reasons of all parameters, from shared facts: the attention sites, and the block of each node."""

    def __init__(self, decisions: Decisions, sites: tuple[AttentionSite, ...]) -> None:
        self.decisions, self.tp = decisions, decisions.mesh.tp
        representative = decisions.blocks.representative
        feeders = {name for site in sites for name in site.feeders}
        self._feeders = {n for n in decisions.program.parameters if representative.get(n, n) in feeders}
        self._asked_for = {site.node.name for site in sites if is_overridden(decisions.placements, site)}
        self._site_of = {node.name: site for site in sites for node in site.nodes}
        self._block = decisions.blocks.block_of()
        self._width = {name: w.width for layer in decisions.experts.layers for w in layer.weights for name in w.nodes}

    # ---- texts of a parameter row

    def style_and_reason(self, node: fx.Node) -> tuple[str, str]:
        style, reason = self._style_and_reason(node)
        frozen = "" if node.meta["grad"] or not node.users else "; frozen: no gradient"
        return style, reason + frozen

    def _style_and_reason(self, node: fx.Node) -> tuple[str, str]:
        if not node.users:
            return "replicate", "does not reach the loss"
        if node.name in self.decisions.expert_parts:
            return "expert", self._experts_words(node)
        if self.tp == 1:
            return "replicate", f"{self._readers_words(node)}: tp = 1"
        placement = self.decisions.placements.of(node)
        if not placement.is_sharded:
            return "replicate", self._why_whole(node, placement)
        style, why = self._why_cut(node, placement)
        asked = self.decisions.placements.styles.get(node.name)
        if asked is not None and (node.meta["val"].dim() > 1 or style == asked):
            style, why = asked, f"override: {asked}"
        return style, why + _segments(placement, self.tp)

    def _readers_words(self, node: fx.Node) -> str:
        return " and ".join(dict.fromkeys(op_words(r) for r in readers(node)))

    # ---- of experts

    def _experts_words(self, node: fx.Node) -> str:
        """Return the reason of an expert weight: ``8 experts over ep 4: 2 on a rank; width over etp 2``."""
        part, mesh = self.decisions.expert_parts[node.name], self.decisions.mesh
        if part.dim >= 0:
            over_ep = f"{part.num_experts} experts over ep {mesh.ep}: {part.num_experts // mesh.ep} on a rank"
        else:
            owner = part.owner(mesh.ep)
            over_ep = f"expert {part.number} of {part.num_experts} over ep {mesh.ep}: on ep rank {owner} only"
        placement = self.decisions.placements.of(node)
        if placement.is_sharded:
            what = "width" if placement.dim == self._width.get(node.name) else f"dim {placement.dim}"
            return f"{over_ep}; {what} over etp {mesh.etp}{_segments(placement, mesh.etp, 'etp')}"
        if mesh.etp == 1:
            return over_ep
        partial = f"; {summed('etp')}" if placement.kind == "R" else ""
        return f"{over_ep}; replicated over etp{partial}"

    # ---- cut

    def _why_cut(self, node: fx.Node, placement: Placement) -> tuple[str, str]:
        reading, words = list(readers(node)), self._readers_words(node)
        forms = {self.decisions.placements.options[r.name].form for r in reading}
        goals = [n for r in reading for n in self._walk(r, cut=True) if has_flops(n) or is_loss(n)]
        loss = next((g for g in goals if is_loss(g)), None)
        if not forms.isdisjoint(OF_VOCABULARY) or (loss is not None and placement.dim in (0, 1)):
            return "vocab", f"{words}: {_vocabulary(placement, forms, loss)}"
        if len(node.meta["val"].shape) == 1:
            return "column", f"{words}: sharded like the features that it is applied to"
        if Form.ROW in forms:
            return "row", f"{words}: sums over sharded features; one all-reduce adds the partial results (g)"
        return "column", f"{words}: {_purpose(goals)}"

    # ---- replicated

    def _why_whole(self, node: fx.Node, placement: Placement) -> str:
        if self.decisions.placements.styles.get(node.name) == "replicate":
            return "override: replicate"
        partial = f"; {summed('tp')}" if placement.kind == "R" else ""
        words = self._readers_words(node)
        if len(node.meta["val"].shape) < 2:
            return f"{words} {self._vector_place(node, placement)}{partial}"
        return f"{words}: {self.obstacle(node)}{partial}"

    def _vector_place(self, node: fx.Node, placement: Placement) -> str:
        if placement.kind == "R":
            return "inside the tensor-parallel region: replicated, with a partial gradient on every rank"
        reader = next(readers(node))
        others = [n for n in reader.all_input_nodes if n.op == "call_function"]
        if reader.target is aten.add.Tensor and any(self.decisions.placements.of(n).kind == "P" for n in others):
            return "after the all-reduce: added once, replicated"
        return "outside the tensor-parallel regions: replicated"

    def obstacle(self, node: fx.Node) -> str:
        reading = list(readers(node))
        return next(
            (why for reader in reading for why in self._obstacles(node, reader)),
            "sharding it would cost more communication than it saves",
        )

    def _obstacles(self, node: fx.Node, reader: fx.Node) -> Iterator[str]:
        if rule_of(reader) is None:
            yield f"{op_name(reader)} has no rule"
        for site in self._sites_near(reader):
            if site.is_cut and node.name in self._feeders:
                yield from self._uneven_keys(reader, site)
            elif not site.is_cut:
                yield (
                    site.why_whole(self.tp) if site.heads else f"its attention is replicated: {site.why_whole(self.tp)}"
                )
        if reader.target in PRODUCTS or reader.target is aten.embedding.default:
            yield from self._uneven_dims(node)
        if packet_of(reader.target) is aten._grouped_mm:
            yield from chain(self._uneven_dims(node), self._unaligned_dims(node))
        for node in self._walk(reader, cut=False):
            if node.op == "call_function" and node.meta.get("grad") and rule_of(node) is None:
                yield f"{op_name(node)}, which reads the result, has no rule"
                return

    def _uneven_keys(self, reader: fx.Node, site: AttentionSite) -> Iterator[str]:
        """Yield the obstacle if query heads are sharded, but tp does not divide the key heads."""
        keys, rest = divmod(int(reader.meta["val"].shape[-1]), site.head_size)
        if not rest and keys < self.tp:
            them = "it" if keys == 1 else "them"
            yield f"only {count(keys, 'key head')} for tp {self.tp}: every rank computes {them}"
        elif not rest and keys % self.tp:
            yield f"{keys} key heads are not divisible by tp = {self.tp}: every rank computes them"

    def _uneven_dims(self, node: fx.Node) -> Iterator[str]:
        yield from filter(None, [uneven_words(node.meta["val"].shape, self.tp, ";")])

    def _unaligned_dims(self, node: fx.Node) -> Iterator[str]:
        """Yield the obstacle if shards would break the 16-byte alignment of rows that grouped products need."""
        val = node.meta["val"]
        odd = [d for d, n in enumerate(val.shape) if d and int(n) * val.element_size() % (ROW_BYTES * self.tp)]
        if odd:
            dims = " and ".join(f"dim {d} = {val.shape[d]}" for d in odd)
            yield f"{dims} over tp = {self.tp}: a rank's rows would be no multiple of {ROW_BYTES} bytes"

    def is_uneven(self, node: fx.Node) -> bool:
        """Whether an indivisible size keeps a parameter replicated, not the cost: a dim, or the heads of attention."""
        if self.decisions.placements.of(node).is_sharded or self.tp == 1 or not node.users:
            return False
        if node.name in self.decisions.expert_parts:
            return False
        sites = [s for r in readers(node) for s in self._sites_near(r) if s.node.name not in self._asked_for]
        return any(True for _ in self._uneven_dims(node)) or any(not s.is_cut and not s.divides(self.tp) for s in sites)

    # ---- the graph around a reader

    def _sites_near(self, reader: fx.Node) -> list[AttentionSite]:
        """Return the attention sites that a projection feeds, or that feed it."""
        ahead = [n for n in self._walk(reader, cut=False) if is_attention(n)]
        behind = [n for n in self._walk_back(reader) if is_attention(n)]
        names = (self.decisions.blocks.representative.get(n.name, n.name) for n in (*ahead, *behind))
        return list(dict.fromkeys(self._site_of[n] for n in names if n in self._site_of))

    def _walk(self, reader: fx.Node, *, cut: bool) -> Iterator[fx.Node]:
        """Yield the nodes of the same block that depend on ``reader``, up to the next products; ``cut``: along sharded
        values only."""
        stack, seen, block = [reader], {reader}, self._block.get
        while stack and len(seen) < _MAX_WALK:
            node = stack.pop(0)
            if node is not reader:
                yield node
                if has_flops(node) or is_loss(node):
                    continue
            if cut and not self.decisions.placements.of(node).is_sharded:
                continue
            for user in node.users:
                if user not in seen and user.op == "call_function" and block(user.name) == block(reader.name):
                    seen.add(user)
                    stack.append(user)

    def _walk_back(self, reader: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes before ``reader``, along ops with one operand, up to the first product."""
        node = reader
        for _ in range(20):
            active = [
                n for n in node.all_input_nodes if n.op == "call_function" and n.meta.get("grad") and not is_weight(n)
            ]
            if len(active) != 1:
                return
            node = active[0]
            yield node
            if has_flops(node):
                return


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the ops that use a parameter, directly or through reshapes and the like."""
    for user in node.users:
        if user.target in SEE_THROUGH or user.target is operator.getitem:
            yield from readers(user)
        elif user.op == "call_function":
            yield user


def is_loss(node: fx.Node) -> bool:
    return node.target is aten.cross_entropy_loss.default or node.target is getattr(aten.nll_loss_nd, "default", None)


def is_linear(node: fx.Node) -> bool:
    """Whether a node multiplies an activation with a weight."""
    if node.target not in PRODUCTS:
        return False
    terms = equation(node)
    return terms is not None and any(map(is_weight, terms[0])) and not all(map(is_weight, terms[0]))


def op_words(node: fx.Node) -> str:
    """Return the usual name of the op that reads a parameter."""
    if is_linear(node):
        return "linear" if node.target in (aten.linear.default, aten.mm.default) else op_name(node)
    if node.target is aten.add.Tensor and any(is_linear(n) for n in node.all_input_nodes):
        return "bias of linear"
    return "scale" if node.target is aten.mul.Tensor else op_name(node)


def _purpose(goals: list[fx.Node]) -> str:
    if any(is_attention(g) for g in goals):
        return "features sharded by heads: each rank runs attention on its own heads"
    if goals:
        return "features sharded, because the next linear sums over them"
    return "output features sharded"


def _vocabulary(placement: Placement, forms: set[Form], loss: fx.Node | None) -> str:
    parts = ["sharded over the vocabulary" if loss is not None else "rows sharded"]
    if placement.padding:
        parts[0] += f", padded by {placement.padding}"
    if not forms.isdisjoint(OF_VOCABULARY):
        parts.append("one all-reduce completes a lookup")
    if loss is not None:
        parts.append("each rank computes the loss on its shard, logits are never gathered")
    return "; ".join(parts)


def _segments(placement: Placement, size: int, axis: str = "tp") -> str:
    whole = [s.size for s in placement.segments if not s.sharded]
    if whole:
        sizes = " and ".join(map(str, whole))
        why = f"rank (fewer key heads than tp = {size})" if axis == "tp" else f"{axis} rank"
        return f"; its segments of {sizes} are replicated on each {why}, their {summed(axis)}"
    return f"; each of its {len(placement.segments)} fused segments separately" if len(placement.segments) > 1 else ""
