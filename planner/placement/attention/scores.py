"""The products of activations that are attention: those with a softmax over scores between them.

    scores = q @ kᵀ  →  scale, mask, bias  →  softmax  →  dropout, casts  →  @ v

Grouped products, covariances, similarities for a loss, linear attention and state-space mixing are products of two
activations as well, and not attention: they have no scores with heads that must stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from passes.program.ops.groups import ATTENTION, SOFTMAXES, WITH_WEIGHT
from passes.program.ops.products import PRODUCTS
from passes.program.walks import Step, operands, readers, walk
from passes.program.weights import is_weight
from passes.rules.flops import has_flops

_MAX_WALK = 400


def is_product_of_activations(node: fx.Node) -> bool:
    """A product of operands that all carry a gradient and are no weights."""
    return _multiplies_activations(node) and all(map(_is_made, node.all_input_nodes))


def _multiplies_activations(node: fx.Node) -> bool:
    """The same, with weights allowed between them: scores or values times a projection in one einsum."""
    is_product = node.target in PRODUCTS and node.target not in WITH_WEIGHT
    return is_product and sum(map(_is_made, node.all_input_nodes)) > 1


def _is_made(node: fx.Node) -> bool:
    return bool(node.meta.get("grad")) and not is_weight(node)


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
    """Also one that is written by hand, with exp."""
    found = _up_to_products(product, step)
    return [n for n in found if n.target in SOFTMAXES or n.target is torch.ops.aten.exp.default]


def _meets(softmax: fx.Node, step: Step, is_product: Callable[[fx.Node], bool]) -> bool:
    return any(map(is_product, _up_to_products(softmax, step)))


def _up_to_products(start: fx.Node, step: Step) -> Iterator[fx.Node]:
    """Nodes from ``start`` by ``step``, up to the next products, those included."""
    return walk(step(start), step, into=_is_activation, stop=has_flops, most=_MAX_WALK)


def _is_activation(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.meta.get("grad"))
