"""The call that represents a captured node on one rank: the function and sizes of passes.localize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.moe import exchange
from passes.moe.domain import domain_of
from passes.partition.options.forms import Form
from passes.partition.options.table import Option
from passes.partition.sequence.local_calls import local_arguments
from passes.program.ops.aten import arguments, is_random, named
from passes.program.ops.groups import WITH_SIZES
from passes.program.ops.over_data import over_data
from passes.program.ops.overwritten import loses_logits
from planner.saved import attention_kernels, of_sequence, stand_ins
from planner.saved.of_sequence import OF_SEQUENCE

aten = torch.ops.aten

SPELLED_ANEW = {Form.VOCABULARY, Form.CLASSES, Form.OVER_RANKS, Form.PICKED}
# Values of experts: the exchanged counts are known once rows are routed, so these have the size of the even case
OF_EXPERTS = {
    exchange.dispatch,
    exchange.give_back,
    exchange.grouped_mm,
    exchange.part,
    exchange.join,
    exchange.send_slots,
    exchange.return_slots,
    exchange.meet,
    exchange.ends_of,
    exchange.ids_of,
}
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _by_kernel(target: Any) -> Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]:
    return lambda kwargs: (target, {**kwargs, "attend": attention_kernels.attention})


# Stand-ins for attention and norms on a GPU, from their keywords.
ON_GPU: dict[Any, Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    aten.scaled_dot_product_attention.default: lambda kwargs: (attention_kernels.attention, kwargs),
    aten.rms_norm.default: lambda kwargs: (stand_ins.rms_norm_kernel, kwargs),
    stand_ins.shared_key_attention: _by_kernel(stand_ins.shared_key_attention),
    of_sequence.causal_attention: _by_kernel(of_sequence.causal_attention),
}


def local_call(node: fx.Node, option: Option, tp: int, shape: Sequence[int]) -> Call | None:
    """Target, arguments and keywords (nodes among them) of ``node`` on one of ``tp`` ranks, with a result of ``shape``.

    None if no such call can be observed.
    """
    if node.target in OF_EXPERTS:
        return None
    if node.target in OF_SEQUENCE:
        return OF_SEQUENCE[node.target], tuple(node.args), dict(node.kwargs)
    if node.target is over_data:
        return stand_ins.summed, node.args, {}
    if node.target is aten.dropout.default and is_random(node):
        given = arguments(node)
        return stand_ins.dropout, (given["input"], given["p"], given["train"]), {}
    target: Any = node.target
    args, kwargs = tuple(node.args), dict(node.kwargs)
    if node.target in WITH_SIZES and (domain_of(node) is not None or option.form is Form.SIZES):
        return target, (args[0], list(shape), *args[2:]), kwargs
    of_classes = node.target is aten.cross_entropy_loss.default and (tp == 1 or option.form is Form.CLASSES)
    if of_classes and loses_logits(node):
        return stand_ins.overwriting_cross_entropy, args, kwargs
    if tp == 1 or option.form not in REWRITTEN:
        return target, args, kwargs
    return REWRITTEN[option.form](node, option, tp)


def _sized(node: fx.Node, option: Option, tp: int) -> Call:
    return node.target, tuple(local_arguments(node, option, tp)), dict(node.kwargs)  # pyright: ignore


def _groups(node: fx.Node, option: Option, tp: int) -> Call:
    given, channels = named(node), option.args[0]
    name = "groups" if "groups" in given else "num_groups"
    given[name] = given[name] * channels.local_size(tp) // sum(channels.sizes)
    return _by_name, (node.target, given), {}


def _by_name(target: Any, given: dict[str, Any]) -> Any:
    return target(*(given[a.name] for a in target._schema.arguments))


def _mean(node: fx.Node, option: Option, tp: int) -> Call:
    return _scaled_mean, (node.target, tp, *node.args), dict(node.kwargs)


def _scaled_mean(target: Any, tp: int, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs) * (1.0 / tp)


def _anew(node: fx.Node, option: Option, tp: int) -> Call:
    return stand_ins.SPELLED_ANEW[node.target], tuple(node.args), dict(node.kwargs)


def _shared_keys(node: fx.Node, option: Option, tp: int) -> Call:
    given = {k: v for k, v in arguments(node).items() if k not in ("query", "key", "value")}
    return stand_ins.shared_key_attention, (*node.args[:3], tp), given


REWRITTEN: dict[Form, Callable[[fx.Node, Option, int], Call]] = {
    Form.SPLIT: _sized,
    Form.SEGMENT: _sized,
    Form.STRIDED: _sized,
    Form.GROUPS: _groups,
    Form.MEAN: _mean,
    Form.SHARED_KEYS: _shared_keys,
    **dict.fromkeys(SPELLED_ANEW, _anew),
}
