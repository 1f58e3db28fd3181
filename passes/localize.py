"""Make each op compute this rank's part: written sizes become local, and a few ops become their parallel form.

    reshape, expand      sizes of the local result
    split, slice         bounds in the local row of segments
    convolution, norm    by groups of channels: this rank's groups
    mean over a cut dim  the local mean times local/global count
    embedding            rows of this rank (passes.ops.vocabulary)
    cross_entropy        columns of this rank (passes.ops.vocabulary)
    logsumexp, softmax   over the ranks' parts of a cut dim (passes.ops.softmax); gather from one likewise
    norms                over the ranks' parts of the features (passes.ops.norm)
    vector_norm, amax    over the ranks' parts of a cut dim (passes.ops.reductions)
    attention            key heads that this rank's query heads read (passes.ops.attention)

Needs:   typed edges (passes.insert_collectives).
Leaves:  every value in the shape that this rank holds of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.insert_collectives import axis_node
from passes.moe.domain import domain_of, in_domain
from passes.ops.attention import attention_arguments, shared_key_attention
from passes.ops.causal_attention import causal_attention, shared_key_causal_attention
from passes.ops.norm import cut_layer_norm, cut_rms_norm
from passes.ops.reductions import cut_amax, cut_amin, cut_vector_norm
from passes.ops.softmax import cut_gather, cut_log_softmax, cut_logsumexp, cut_softmax
from passes.ops.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from passes.partition.options.forms import Form
from passes.partition.writer import AXIS, Rewrite, Scene, rewrite
from passes.program.ops.aten import arguments, named
from passes.program.ops.groups import WITH_SIZES
from passes.types.sizes import Sizes

aten = torch.ops.aten


def localize(stage: StageGraph, context: LowerContext) -> None:
    """Rewrite every op of the stage, unless its form is the same op on a rank's tensors."""
    for name, node in list(stage.env.items()):
        option = context.lowering.placements.options[name]
        axis = context.axis_of(node)
        scene = Scene(node, option, axis.size, partial(axis_node, stage, axis))
        if node.op == "call_function" and domain_of(node) is not None and node.target in WITH_SIZES:
            _sizes_among_experts(scene, context.lowering.sizes)
        elif node.op == "call_function" and axis.size > 1:
            stage.env[name] = rewrite(scene, OVER_TP)


def _sizes_among_experts(scene: Scene, mesh: Sizes) -> None:
    """Experts are those of this rank, and how many rows there are follows the routing."""
    domain = domain_of(scene.node)
    if domain is not None:
        local = in_domain(scene.node, tuple(scene.local_shape()), mesh)
        scene.set_arg(1, [-1 if d == domain.rows else n for d, n in enumerate(local)])


def _groups(scene: Scene) -> None:
    """Convolutions and norms by groups of channels: this rank's share of the groups."""
    given, channels = named(scene.node), scene.input_type(0)
    name = "groups" if "groups" in given else "num_groups"
    scene.set_named(name, given[name] * channels.local_size(scene.size) // sum(channels.sizes))


def _embedding(scene: Scene) -> None:
    operands: Any = scene.node.args[:3]
    weight, ids, *padding_idx = operands
    scene.become(vocabulary_embedding, (weight, ids, AXIS, int(weight.meta["val"].shape[0]), *padding_idx))


def _cross_entropy(scene: Scene) -> None:
    given = arguments(scene.node)
    logits = given["self"]
    options = {k: v for k, v in given.items() if k not in ("self", "target") and v is not None}
    scene.become(vocabulary_cross_entropy, (logits, given["target"], AXIS, int(logits.meta["val"].shape[1])), options)


def _over_ranks(scene: Scene) -> None:
    STATISTICS[scene.node.target](scene, named(scene.node))


def _logsumexp(scene: Scene, given: dict[str, Any]) -> None:
    scene.become(cut_logsumexp, (given["self"], given["dim"], given["keepdim"], AXIS, _cut_size(scene, given["self"])))


def _softmax(scene: Scene, given: dict[str, Any]) -> None:
    x, dim = given["self"], scene.input_type(0).dim
    function = cut_softmax if scene.node.target is aten.softmax.int else cut_log_softmax
    scene.become(function, (x, dim, given["dtype"], AXIS, _cut_size(scene, x)))


def _layer_norm(scene: Scene, given: dict[str, Any]) -> None:
    size = int(given["normalized_shape"][0])
    scene.become(cut_layer_norm, (given["input"], given["weight"], given["bias"], given["eps"], AXIS, size))


def _rms_norm(scene: Scene, given: dict[str, Any]) -> None:
    size = int(given["normalized_shape"][0])
    scene.become(cut_rms_norm, (given["input"], given["weight"], given["eps"], AXIS, size))


def _vector_norm(scene: Scene, given: dict[str, Any]) -> None:
    scene.become(cut_vector_norm, (given["self"], given["dim"], given["keepdim"], AXIS))


def _extreme(scene: Scene, given: dict[str, Any]) -> None:
    function = cut_amax if scene.node.target is aten.amax.default else cut_amin
    scene.become(function, (given["self"], given["dim"], given["keepdim"], AXIS))


def _cut_size(scene: Scene, x: fx.Node) -> int:
    """The full size of the sharded dim of ``x``."""
    return int(x.meta["val"].shape[scene.input_type(0).dim])


def _picked(scene: Scene) -> None:
    given = named(scene.node)
    x, dim = given["self"], scene.input_type(0).dim
    scene.become(cut_gather, (x, dim, given["index"], AXIS, _cut_size(scene, x)))


def _attention(scene: Scene) -> None:
    if scene.node.target is causal_attention:
        *operands, cp = scene.node.args
        scene.become(shared_key_causal_attention, (*operands, AXIS, cp), dict(scene.node.kwargs))
        return
    given = attention_arguments(scene.node.args, scene.node.kwargs)
    scene.become(shared_key_attention, (*scene.node.args[:3], AXIS), given)


OVER_TP: dict[Form, Rewrite] = {
    Form.GROUPS: _groups,
    Form.VOCABULARY: _embedding,
    Form.CLASSES: _cross_entropy,
    Form.OVER_RANKS: _over_ranks,
    Form.PICKED: _picked,
    Form.SHARED_KEYS: _attention,
}
STATISTICS: dict[Any, Callable[[Scene, dict[str, Any]], None]] = {
    aten.logsumexp.default: _logsumexp,
    aten.softmax.int: _softmax,
    aten.log_softmax.int: _softmax,
    aten.layer_norm.default: _layer_norm,
    aten.rms_norm.default: _rms_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
}
