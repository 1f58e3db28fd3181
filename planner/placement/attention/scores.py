"""The products of activations that are attention: those with a softmax over scores between them.

    scores = q @ kᵀ  →  scale, mask, bias  →  softmax  →  dropout, casts  →  @ v

Grouped products, covariances, similarities for a loss, linear attention and state-space mixing are products of two
activations as well, and not attention: they have no scores with heads that must stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from planner.graph.ops.flops import node_flops
from planner.graph.ops.groups import ATTENTION
from planner.graph.ops.products import is_made_of_weights
from planner.graph.walks import Step, operands, readers, walk

aten = torch.ops.aten
BATCHED = {aten.matmul.default, aten.bmm.default, aten.einsum.default}
SOFTMAXES = {
    aten.softmax.int,
    aten._softmax.default,
    getattr(aten, "_safe_softmax", aten._softmax).default,
    aten.exp.default,
}  # exp: a softmax written by hand
_MAX_WALK = 400


def is_product_of_activations(node: fx.Node) -> bool:
    """A product of operands that all carry a gradient and are no weights."""
    read = node.all_input_nodes
    return node.op == "call_function" and node.target in BATCHED and len(read) > 1 and all(map(_is_made, read))


def _multiplies_activations(node: fx.Node) -> bool:
    """The same, with weights allowed between them: scores or values times a projection in one einsum."""
    return node.op == "call_function" and node.target in BATCHED and sum(map(_is_made, node.all_input_nodes)) > 1


def _is_made(node: fx.Node) -> bool:
    return bool(node.meta.get("grad")) and not is_made_of_weights(node)


def has_scores(product: fx.Node) -> bool:
    """Whether a product of activations makes scores that a softmax turns into the factors of another, or reads such."""
    if "has_scores" not in product.meta:
        product.meta["has_scores"] = any(
            _meets(s, step, is_product_of_activations)
            for step in (readers, operands)
            for s in _softmaxes(product, step)
        )
    return product.meta["has_scores"]


def mixes_values(node: fx.Node) -> bool:
    """Whether a call gives the mixture of values that scores ask for: sdpa, or the product after the softmax."""
    if node.target in ATTENTION:
        return True
    if not _multiplies_activations(node):
        return False
    return any(_meets(s, operands, _multiplies_activations) for s in _softmaxes(node, operands))


def _softmaxes(product: fx.Node, step: Step) -> list[fx.Node]:
    return [n for n in _up_to_products(product, step) if n.target in SOFTMAXES]


def _meets(softmax: fx.Node, step: Step, is_product: Callable[[fx.Node], bool]) -> bool:
    return any(map(is_product, _up_to_products(softmax, step)))


def _up_to_products(start: fx.Node, step: Step) -> Iterator[fx.Node]:
    """Nodes from ``start`` by ``step``, up to the next products, those included."""
    return walk(step(start), step, into=_is_activation, stop=lambda n: bool(node_flops(n)), most=_MAX_WALK)


def _is_activation(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("grad"))
