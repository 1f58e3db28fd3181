"""Finds attention, by structure, and checks that tp shards it. Attention is two products around a softmax:

    scores = q @ kᵀ  →  scale, mask, bias  →  softmax  →  dropout, casts  →  @ v

Grouped products, covariances, similarities in a loss, linear attention and state-space mixing multiply two activations
too, but are not attention: they have no scores with heads that must stay together.

An attention site is one kind of such products in one module: sdpa, or the two products written by hand. Its heads are
the dims, except the batch, that both operands and the result share. If tp does not divide the heads, the solver leaves
the site replicated, and the plan carries a warning. Planning fails if no site of the model is sharded (unless an
override replicates it), or if tp shards nothing at all; the error names the nearest valid tp.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from passes.blocks.blocks import Blocks, glob_of
from passes.errors import PlanError
from passes.partition.type_changes import Placements
from passes.program.ops.groups import ATTENTION, PRODUCTS, SOFTMAXES, WITH_WEIGHT
from passes.program.program import Program
from passes.program.source_lines import module_of, where_of
from passes.program.walks import Step, operands, readers, walk
from passes.program.weights import is_weight, matrices_read
from passes.rules.flops import has_flops
from passes.rules.table import equation
from planner.placement.candidates import Cutting, divisors, nearest_tp, nearest_words
from planner.placement.decide import typing_problem

aten = torch.ops.aten
_MAX_WALK = 400  # more than the nodes between a projection and its attention in any model
_TRIES = 3  # sizes tried below and above tp; each try runs the solver


def is_product_of_activations(node: fx.Node) -> bool:
    """Whether a node multiplies operands that all have a gradient and are not weights."""
    return _multiplies_activations(node) and all(map(_is_made, node.all_input_nodes))


def _multiplies_activations(node: fx.Node) -> bool:
    """Whether a node multiplies two or more activations; it may multiply weights too, as one einsum can."""
    is_product = node.target in PRODUCTS and node.target not in WITH_WEIGHT
    return is_product and sum(map(_is_made, node.all_input_nodes)) > 1


def _is_made(node: fx.Node) -> bool:
    return bool(node.meta.get("grad")) and not is_weight(node)


def has_scores(product: fx.Node) -> bool:
    """Whether a softmax lies between this product of activations and another one, in either direction."""
    if "has_scores" not in product.meta:
        product.meta["has_scores"] = any(
            _meets(s, step, is_product_of_activations)
            for step in (readers, operands)
            for s in _softmaxes(product, step)
        )
    return product.meta["has_scores"]


def mixes_values(node: fx.Node) -> bool:
    """Whether a call computes probabilities @ v: sdpa, or the product after the softmax."""
    if node.target in ATTENTION:
        return True
    if not _multiplies_activations(node):
        return False
    return any(_meets(s, operands, _multiplies_activations) for s in _softmaxes(node, operands))


def _softmaxes(product: fx.Node, step: Step) -> list[fx.Node]:
    """Return the softmaxes between ``product`` and the next products; an exp counts as one written by hand."""
    between = _up_to_products(product, step)
    return [n for n in between if n.target in SOFTMAXES or n.target is torch.ops.aten.exp.default]


def _meets(softmax: fx.Node, step: Step, is_product: Callable[[fx.Node], bool]) -> bool:
    return any(map(is_product, _up_to_products(softmax, step)))


def _up_to_products(start: fx.Node, step: Step) -> Iterator[fx.Node]:
    """Yield the nodes from ``start`` in the direction of ``step``, up to and including the next products."""
    return walk(step(start), step, into=_is_of_activations, stop=has_flops, most=_MAX_WALK)


def _is_of_activations(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("grad"))


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """One kind of attention in one module. ``nodes``: its products; ``heads``, ``groups``: numbers of query and key
    heads (0 without such a dim); ``feeders``: weights of its input projections, in the first block of the kind.
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
        """Return the reason for replication: ``3 heads are not divisible by tp = 2; nearest valid tp: 1, 3``."""
        if self.divides(tp):
            if not self.heads:
                return "it has no dim of heads that a rule could shard"
            return f"no rule propagates sharding of its {count(self.heads, 'head')} through to its operands"
        return (
            f"{self.words('head')} {'is' if self.heads == 1 else 'are'} not divisible by tp = {tp}; "
            f"{nearest_words([self.heads], tp)}"
        )

    def words(self, noun: str) -> str:
        """Return the number of heads in words: ``6 heads (2 key heads)``."""
        keys = f" ({count(self.groups, 'key head')})" if self.groups not in (0, self.heads) else ""
        return count(self.heads, noun) + keys


def count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def attention_sites(program: Program, blocks: Blocks, placements: Placements) -> tuple[AttentionSite, ...]:
    """Return the attention sites of each kind of block, in graph order."""
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
    """Whether a node is the fused op, or one of the two products around the softmax."""
    if node.op != "call_function" or not node.meta.get("grad"):
        return False
    if node.target in ATTENTION:
        return True
    return is_product_of_activations(node) and has_scores(node)


def _operands(node: fx.Node) -> list[fx.Node]:
    """Return the queries, keys and values of sdpa, or both operands of a product."""
    if node.target in ATTENTION:
        return [n for n in node.args[:3] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def head_counts(node: fx.Node) -> tuple[int, int]:
    """Return (query heads, key heads) of an attention product; 0 if the operands have no such dim."""
    if node.target in ATTENTION:
        return _heads_of_shape(_operands(node)[0]), _heads_of_shape(_operands(node)[1])
    if node.target is aten.einsum.default:
        terms = equation(node)
        if terms is None:
            return 0, 0
        operands, words, out = terms
        shared = [c for c in words[0] if c != words[0][0] and c in out and all(c in word for word in words)]
        heads = prod(int(operands[0].meta["val"].shape[words[0].index(c)]) for c in shared) if shared else 0
        return heads, heads
    return _heads_of_shape(_operands(node)[0]), _heads_of_shape(_operands(node)[-1])


def _heads_of_shape(node: fx.Node) -> int:
    """Return the heads of [b, heads, s, d], also if batch and heads were merged into one dim for a bmm."""
    for _ in range(8):
        shape = getattr(node.meta["val"], "shape", ())
        if len(shape) >= 4:
            return prod(int(n) for n in shape[1:-2])
        if node.op != "call_function" or not node.all_input_nodes:
            return 0
        node = node.all_input_nodes[0]
    return 0


def _weights_behind(start: fx.Node) -> Iterator[fx.Node]:
    """Yield the weights of the projections that compute a value."""
    inside = walk(
        [start],
        operands,
        into=lambda n: _is_of_activations(n) and not is_attention(n),
        stop=lambda n: bool(_matrices_of(n)),
        most=_MAX_WALK,
    )
    for node in inside:
        yield from _matrices_of(node)


def _matrices_of(node: fx.Node) -> list[fx.Node]:
    return matrices_read(node) if node.target in PRODUCTS else []


def is_overridden(placements: Placements, site: AttentionSite) -> bool:
    """Whether an override of the spec sets the style of a weight that feeds this attention."""
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


def check_something_is_cut(
    program: Program, blocks: Blocks, placements: Placements, sites: tuple[AttentionSite, ...], vocabulary_multiple: int
) -> None:
    """Raise PlanError if tp > 1 and shards nothing, unless overrides replicate every matrix."""
    tp = placements.tp
    if tp == 1 or any(option.out.is_sharded for option in placements.options.values()):
        return
    matrices = _matrices(program)
    if placements.styles and all(placements.styles.get(name) == "replicate" for name in matrices):
        return
    if not matrices:
        raise PlanError(f"tp = {tp} shards nothing: the model has no matrix", where="mesh.tp", fix="set mesh.tp: 1")
    dividing = sorted({d for shape in matrices.values() for size in shape for d in divisors(int(size)) if d > 1})
    sizes = [n for n in dividing if not sites or any(site.divides(n) for site in sites)]
    valid = list(_that_cut(program, blocks, tp, sizes, vocabulary_multiple))
    choice = f"choose tp from {{{', '.join(map(str, [1, *sorted(valid)]))}}}" if valid else "set mesh.tp: 1"
    raise PlanError(
        f"tp = {tp} shards nothing: no layer gains from sharding over {tp} ranks",
        where="mesh.tp",
        fix=choice,
    )


def _matrices(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the shape of each matrix that reaches the loss, by placeholder."""
    nodes = [program.node(name) for name in program.parameters]
    return {n.name: tuple(n.meta["val"].shape) for n in nodes if n.users and n.meta["val"].dim() > 1}


def _that_cut(program: Program, blocks: Blocks, tp: int, sizes: list[int], vocabulary_multiple: int) -> Iterator[int]:
    """Yield the nearest tp below and above that shard something; runs the solver for each candidate."""
    for side in ([n for n in reversed(sizes) if n < tp], [n for n in sizes if n > tp]):
        for size in side[:_TRIES]:
            solved = typing_problem(program, blocks, Cutting(size, vocabulary_multiple=vocabulary_multiple)).decided()
            if any(option.out.is_sharded for option in solved.options.values()):
                yield size
                break
