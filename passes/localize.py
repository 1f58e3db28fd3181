"""Put a collective on every edge between different types, exactly those that the plan lists; then make each op compute
this rank's part: written sizes become local, and a few ops become their parallel form.

    reshape, expand      sizes of the local result
    split, slice         bounds in the local row of segments
    convolution, norm    by groups of channels: this rank's groups
    mean over a cut dim  the local mean times local/global count
    embedding            rows of this rank (passes.ops.vocabulary)
    cross_entropy        columns of this rank (passes.ops.vocabulary)
    logsumexp, softmax   over the ranks' parts of a cut dim (passes.ops.over_ranks); gather from one likewise
    norms                over the ranks' parts of the features (passes.ops.over_ranks)
    vector_norm, amax    over the ranks' parts of a cut dim (passes.ops.over_ranks)
    attention            key heads that this rank's query heads read (passes.ops.attention)

Needs:   a stage at global shapes (passes.lower).
Leaves:  ``meta["placement"]`` of every node, every reader gets the type that it wants, and every value is in the shape
         that this rank holds of it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _register_custom_builtin

from passes.base import LowerContext, StageGraph
from passes.moe.domain import domain_of, in_domain
from passes.ops import attention, collectives, over_ranks
from passes.ops.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from passes.partition.type_changes import type_at
from passes.partition.typings.base import Form
from passes.partition.writer import AXIS, Rewrite, Scene, convert, rewrite
from passes.program.ops.aten import arguments, named
from passes.program.ops.groups import WITH_SIZES
from passes.types.types import Placement, Segment

aten = torch.ops.aten
# The generated code of the graph names a collective's cut, and must find these names
NAMES_IN_CODE: dict[str, tuple[str, type]] = {
    "Placement": ("from passes.types.types import Placement", Placement),
    "Segment": ("from passes.types.types import Segment", Segment),
}


def insert_collectives(stage: StageGraph, context: LowerContext) -> None:
    """Insert one call for each change, right after its value, shared by all its readers."""
    lowering = context.lowering
    for name, node in stage.env.items():
        captured = lowering.program.node(name)
        node.meta["placement"] = type_at(lowering.placements, lowering.stages, captured, stage.index)
    changes = lowering.changes[stage.index]
    if not changes:
        return
    for name, (line, kind) in NAMES_IN_CODE.items():
        _register_custom_builtin(name, line, kind)
    output = stage.graph.output_node()
    for change in changes:
        value = stage.env[change.value]
        handle = stage.axis(context.axis_of(value))
        cut = (change.before if change.before.is_sharded else change.after,)
        if change.how.name == "exchange":
            cut = (change.before, change.after)
        elif change.how.name not in collectives.TAKES_CUT:
            cut = ()
        arguments: Any = (value, handle, *cut)
        readers = [stage.env[reader] for reader in change.readers if reader in stage.env]
        function = collectives.BY_NAME[change.how.name]
        call = convert(value, readers, lambda f=function, a=arguments: stage.graph.call_function(f, a))
        call.meta = {**value.meta, "placement": change.after, "change": change}
        for reader in ("send", "loss"):
            if reader in change.readers:
                _replace_output(output, change.value, call, reader)


def _replace_output(output: fx.Node, name: str, call: fx.Node, reader: str) -> None:
    names, values = output.meta["names"], list(output.args[0])  # pyright: ignore
    is_loss = reader == "loss"
    for position, held in enumerate(names):
        last = position == len(names) - 1
        if held == name and (last if is_loss else True):
            values[position] = call
    output.args = (tuple(values),)


def localize(stage: StageGraph, context: LowerContext) -> None:
    """Rewrite every op of the stage, unless its form is the same op on a rank's tensors."""
    for name, node in list(stage.env.items()):
        option = context.lowering.placements.options[name]
        axis = context.axis_of(node)
        scene = Scene(node, option, axis.size, partial(stage.axis, axis))
        domain = domain_of(node)
        if node.op == "call_function" and domain is not None and node.target in WITH_SIZES:
            # experts are those of this rank, and how many rows there are follows the routing
            local = in_domain(node, tuple(scene.local_shape()), context.lowering.sizes)
            node.update_arg(1, [-1 if d == domain.rows else n for d, n in enumerate(local)])
        elif node.op == "call_function" and axis.size > 1:
            stage.env[name] = rewrite(scene, OVER_TP)


def _groups(scene: Scene) -> None:
    """Give convolutions and norms by groups of channels this rank's share of the groups."""
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
    """Write the call with its axis and, if the op reads it, the full size of the sharded dim."""
    (function, names, reads_size), given = STATISTICS[scene.node.target], named(scene.node)
    x, *rest = (given[name] for name in names.split())
    size = (int(x.meta["val"].shape[scene.input_type(0).dim]),) if reads_size else ()
    scene.become(function, (x, *rest, AXIS, *size))


def _attention(scene: Scene) -> None:
    if scene.node.target is attention.causal_attention:
        *operands, cp = scene.node.args
        scene.become(attention.shared_key_causal_attention, (*operands, AXIS, cp), dict(scene.node.kwargs))
        return
    given = attention.attention_arguments(scene.node.args, scene.node.kwargs)
    scene.become(attention.shared_key_attention, (*scene.node.args[:3], AXIS), given)


OVER_TP: dict[Form, Rewrite] = {
    Form.GROUPS: _groups,
    Form.VOCABULARY: _embedding,
    Form.CLASSES: _cross_entropy,
    Form.OVER_RANKS: _over_ranks,
    Form.PICKED: _over_ranks,
    Form.SHARED_KEYS: _attention,
}
STATISTICS: dict[Any, tuple[Callable[..., Any], str, bool]] = {  # function, arguments of the op, and whether the size
    aten.logsumexp.default: (over_ranks.cut_logsumexp, "self dim keepdim", True),
    aten.softmax.int: (over_ranks.cut_softmax, "self dim dtype", True),
    aten.log_softmax.int: (over_ranks.cut_log_softmax, "self dim dtype", True),
    aten.layer_norm.default: (over_ranks.cut_layer_norm, "input weight bias eps", True),
    aten.rms_norm.default: (over_ranks.cut_rms_norm, "input weight eps", True),
    aten.linalg_vector_norm.default: (over_ranks.cut_vector_norm, "self dim keepdim", False),
    aten.amax.default: (over_ranks.cut_amax, "self dim keepdim", False),
    aten.amin.default: (over_ranks.cut_amin, "self dim keepdim", False),
    aten.gather.default: (over_ranks.cut_gather, "self dim index", True),
}
