"""Diagnostics for the user: how each linear, embedding and loss is sharded or why not, ops without a rule, inexact
terms.

warning   sizes that keep a layer replicated, attention sharded in some blocks only, ops without a rule, inexact loss
terms info      everything else, one row for each layer; the tables fold those of repeated blocks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from passes.blocks.places import Places, glob_of
from passes.canonical.norms import spelled_norms
from passes.errors import Where
from passes.moe.layers import Doubt, ExpertLayer
from passes.partition.options.forms import Form
from passes.partition.options.table import rule_of
from passes.program.ops.aten import arguments, is_random, named, packet_of
from passes.program.ops.groups import CONVOLUTIONS
from passes.program.ops.own_backward import OwnBackward
from passes.program.ops.products import holds_weight
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.rules.flops import node_cost, node_flops
from planner.decisions import Decisions
from planner.placement.attention.sites import AttentionSite, weight_of
from planner.placement.divisibility import nearest_tp
from planner.saved.attention_kernels import MATH, kernel_of
from planner.sharding.parameters import ParameterPlan
from planner.tables.reasons import Reasons, is_linear, is_loss, op_name, op_words
from planner.tables.rows import Diagnostic, Summary

aten = torch.ops.aten
DENSE = {  # key → why experts in a loop compute every token with it, and the fix
    "recompute": ("recompute frees saved tensors of fixed shapes", "remove recompute, or set mesh.ep"),
    "cuda_graphs": ("CUDA graphs capture fixed shapes", "remove cuda_graphs, or set mesh.ep"),
}


def diagnostic_rows(
    decisions: Decisions,
    parameters: tuple[ParameterPlan, ...],
    sites: tuple[AttentionSite, ...],
    reasons: Reasons,
    places: Places,
) -> tuple[Diagnostic, ...]:
    """Warnings first, then notes; each once."""
    rows = [
        *_notes(decisions),
        *_sequences(decisions),
        *_inexact(decisions),
        *_untrained(decisions.program),
        *_skipped(decisions),
        *_inferred(decisions),
        *_own_backwards(decisions, places),
        *_kernels(decisions, places),
        *_spelled_norms(decisions, places),
        *_experts(decisions, parameters, places),
    ]
    if decisions.mesh.tp > 1:
        rows += [*_attention(decisions, sites, places), *_without_rule(decisions)]
        rows += _layers(decisions, parameters, reasons, places)
    unique = dict.fromkeys(rows)
    return tuple(sorted(unique, key=lambda row: row.level == "info"))


def _sequences(decisions: Decisions) -> Iterator[Diagnostic]:
    """A cp rank's part of each sequence."""
    context = decisions.context
    for length in context.lengths:
        yield Diagnostic(
            "info",
            f"sequences of {length} tokens are sharded over cp {context.cp}: {length // context.cp} tokens on a "
            f"rank, in 2 of {2 * context.cp} chunks",
            "mesh.cp",
        )


def _notes(decisions: Decisions) -> Iterator[Diagnostic]:
    for note in decisions.program.notes:
        yield Diagnostic("warning", note)
    for what, where in decisions.program.rewrites:
        yield Diagnostic("info", what, str(where))
    for assumption in decisions.program.assumptions:
        yield Diagnostic("info", str(assumption), str(assumption.where))


MOST_NAMED = 4


def _untrained(program: Program) -> Iterator[Diagnostic]:
    """Parameters that ask for a gradient and get none: they never change, as in one process, but is that meant?"""
    names = program.untrained
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield Diagnostic(
            "warning",
            f"{len(names)} parameters get no gradient and are not updated: {', '.join(names[:MOST_NAMED])}{more}",
            names[0].rpartition(".")[0],
            "set requires_grad_(False) on them if this is intended",
        )


def _skipped(decisions: Decisions) -> Iterator[Diagnostic]:
    """Parameters that one process does not update in a step in which data selects no rows for them."""
    resting = decisions.resting
    if resting:
        what = (
            f"{len(resting)} parameters are not updated in a step in which no token chooses their expert, as in one "
            "process"
        )
        yield Diagnostic("info", what, next(iter(resting)).rpartition(".")[0])
    names = sorted(decisions.program.skipped - resting.keys())
    if names:
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        yield Diagnostic(
            "warning",
            f"in a step that selects no rows for {', '.join(names[:MOST_NAMED])}{more}, one process does not update "
            "them; here weight decay and momentum still apply",
            names[0].rpartition(".")[0],
            "read them in every step, without a branch on the selection",
        )


def _inexact(decisions: Decisions) -> Iterator[Diagnostic]:
    for what, where in decisions.terms.counted_first:
        yield Diagnostic(
            "info",
            f"the loss is not a sum over tokens at {what}: all forwards of a step run twice, first to count its sums "
            "over the global batch",
            str(where),
            "for one forward, give each dp rank one microbatch (batch.micro = global / dp), or set batch.statistics: "
            "microbatch, which is not exact",
        )
    for what, where in decisions.terms.inexact:
        yield Diagnostic(
            "warning",
            f"the loss is not a sum over tokens at {what}: it is averaged over microbatches",
            str(where),
            "set batch.statistics: global, give each dp rank one microbatch (batch.micro = global / dp), or write the "
            "loss as a sum divided by a count",
        )
    for what, where in decisions.terms.doubts:
        yield Diagnostic(
            "warning",
            f"{what} in the loss has a constant that may depend on the batch size: the plan uses its value for one "
            "microbatch",
            str(where),
            "keep one microbatch, or divide by a count of the labels, such as mask.sum()",
        )
    for what, where in decisions.terms.unknown:
        yield Diagnostic(
            "warning",
            f"{what} has no rule: if it mixes the sequences of a batch, each microbatch sees only its own",
            str(where),
            _rule_of_own(what),
        )
    for what, where in decisions.terms.mixed:
        yield Diagnostic(
            "warning",
            f"{what} mixes the sequences of a batch: each microbatch sees only its own",
            str(where),
            "keep one microbatch (batch.micro = batch.global, dp: 1) if the sequences must stay together",
        )


def _own_backwards(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """Custom Functions that stay one op each, and why each is sharded or not."""
    for node in decisions.program.graph.graph.nodes:
        if isinstance(node.target, OwnBackward):
            option, facts = decisions.placements.options[node.name], node.target.facts
            what = f"{node.target} is a custom Function with its own backward: one op"
            if decisions.mesh.tp == 1:
                yield Diagnostic("info", what, places.text(node))
            elif option.out.is_sharded:
                yield Diagnostic(
                    "info",
                    f"{what}, sharded over dim {option.out.dim}, after trials on shards, forward and backward",
                    places.text(node),
                )
            else:
                why = "" if facts.cuts else ": a trial on shards failed along every dim"
                why += "" if facts.linear else "; its backward is not linear and needs complete gradients"
                yield Diagnostic("info", f"{what}, replicated on every rank{why}", places.text(node))


def _spelled_norms(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """On a GPU each of their ops is a kernel that reads and writes all features."""
    found = list(spelled_norms(decisions.program)) if decisions.on_gpu else []
    num_ops = sum(norm.num_ops for norm in found)
    if found:
        yield Diagnostic(
            "info",
            f"{len(found)} RMS norms are spelled out, in {num_ops} ops; fuse_norms: true makes each one GPU "
            "kernel forward and one backward, which sum in another order",
            places.text(found[0].results[0]),
        )


def _kernels(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """The kernel with which the memory of attention is counted, if that decides the saved tensors."""
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function" or packet_of(node.target) is not aten.scaled_dot_product_attention:
            continue
        drops = " with dropout" if is_random(node) else ""
        if decisions.on_gpu:
            given = [named(node)[name] for name in ("query", "key", "value", "attn_mask")]
            values: list[Any] = [None if x is None else x.meta["val"] for x in given]
            kernel = kernel_of(*values)
            keeps = (
                "its scores and probabilities"
                if kernel == MATH
                else "its result and one value per row, no probabilities"
            )
            yield Diagnostic(
                "info",
                f"memory of attention{drops} is that of the {kernel} kernel of a GPU, which saves {keeps}",
                places.text(node),
            )
        elif drops:
            yield Diagnostic(
                "info",
                "memory of attention with dropout is that of the CPU kernel, which saves its scores and probabilities",
                places.text(node),
                "name a cluster of GPUs to plan with a GPU kernel",
            )


def _experts(decisions: Decisions, parameters: tuple[ParameterPlan, ...], places: Places) -> Iterator[Diagnostic]:
    """Layers of experts, and parts that look like one."""
    mesh, cut_dim = decisions.mesh, {row.name: row.dim for row in parameters}
    names = decisions.program.parameters
    for layer in decisions.experts.layers:
        cuts = [(w, dim) for w in layer.weights if (dim := cut_dim.get(names.get(w.nodes[0], ""))) is not None]
        how = "all of them"
        if cuts:
            how = "some of them" if all(dim == w.dim for w, dim in cuts) else "a shard of each"
        if mesh.has_expert_axes:
            of_each = f", 1/{mesh.etp} of each" if cuts else ""
            how = f"{layer.num_experts // mesh.ep} of them{of_each}"
        for_a_token = f"{layer.top_k} per token" if layer.top_k else "any number per token"
        what = f"{layer.num_experts} experts, {for_a_token} ({layer.how})"
        where = places.text(decisions.program.node(layer.products[0]))
        yield Diagnostic("info", f"{what}: every rank holds {how}", where)
        if layer.dense is not None:
            yield _computed_densely(layer, layer.dense, where)
    for doubt in decisions.experts.doubts:
        yield Diagnostic(
            "info", f"this looks like a router of experts, but is not planned as one: {doubt.why}", str(doubt.where)
        )


def _computed_densely(layer: ExpertLayer, dense: Doubt, where: str) -> Diagnostic:
    """A loop over experts that computes every token, although tokens choose few experts."""
    what = (
        f"each of the {layer.num_experts} experts computes every token, {layer.num_experts / layer.top_k:g}× the work"
    )
    why, fix = DENSE.get(dense.why, (dense.why, "weight and sum the results of the tokens of each expert"))
    return Diagnostic("info", f"{what}: {why}", str(dense.where or where), fix)


def _attention(decisions: Decisions, sites: tuple[AttentionSite, ...], places: Places) -> Iterator[Diagnostic]:
    for site in sites:
        if not site.is_cut:
            tp = nearest_tp([site.heads], decisions.mesh.tp) if site.heads else [1]
            yield Diagnostic(
                "warning",
                f"this attention is replicated on every rank: {site.why_whole(decisions.mesh.tp)}",
                places.text(site.node),
                "" if site.divides(decisions.mesh.tp) else _choose(tp),
            )


# ---- ops without a rule


@dataclass(frozen=True, slots=True)
class Uncovered:
    """An op without a rule: every rank computes all of it. ``work_fraction``: its share of the estimated work."""

    op: str
    where: Where
    count: int
    work_fraction: float


def ops_without_rule(program: Program) -> tuple[Uncovered, ...]:
    """Ops that carry a gradient and have no rule, by op and line of the user's code; empty if all is covered."""
    nodes = [n for n in program.graph.graph.nodes if n.op == "call_function"]
    found: dict[tuple[str, str, int], list[fx.Node]] = {}
    wheres: dict[tuple[str, str, int], Where] = {}
    for node in nodes:
        if node.meta.get("grad") and rule_of(node) is None and not isinstance(node.target, OwnBackward):
            where = where_of(node)
            key = (str(node.target), where.file, where.line)
            found.setdefault(key, []).append(node)
            wheres.setdefault(key, where)
    total = sum(map(node_cost, nodes)) if found else 1
    return tuple(
        Uncovered(key[0], wheres[key], len(group), sum(map(node_cost, group)) / max(total, 1))
        for key, group in found.items()
    )


def _without_rule(decisions: Decisions) -> Iterator[Diagnostic]:
    for row in ops_without_rule(decisions.program):
        times = f", {row.count} times" if row.count > 1 else ""
        yield Diagnostic(
            "warning",
            f"{row.op} has no rule{times} and is replicated on every rank, {row.work_fraction:.1%} of the "
            "estimated work",
            str(row.where),
            _rule_of_own(row.op),
        )


def _rule_of_own(op: str) -> str:
    return f'if it is an op of your own, give it a rule: planner.rule("{own_name(op)}", "… -> …")'


def own_name(op: str) -> str:
    """``mylib.scan.default`` as torch.library has registered it."""
    namespace, _, rest = op.partition(".")
    return f"{namespace}::{rest.removesuffix('.default')}"


def _inferred(decisions: Decisions) -> Iterator[Diagnostic]:
    """Rules that trials have shown, once for each op and pattern."""
    found: dict[tuple[str, str], fx.Node] = {}
    for node in decisions.program.graph.graph.nodes:
        if "inferred" in node.meta:
            found.setdefault((str(node.target), str(node.meta["inferred"])), node)
    for (op, pattern), node in found.items():
        yield Diagnostic(
            "info",
            f'{op} has no rule; by trials on random values it has "{pattern}"',
            str(where_of(node)),
            f'to say it yourself: planner.rule("{own_name(op)}", "{pattern}"); to replicate such ops: '
            "tensor_parallel.infer_rules: false",
        )


# ---- layers


def _layers(
    decisions: Decisions, parameters: tuple[ParameterPlan, ...], reasons: Reasons, places: Places
) -> Iterator[Diagnostic]:
    """A row for each linear, convolution, embedding and loss."""
    by_name = {row.name: row for row in parameters}
    uneven: dict[str, bool] = {}
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function":
            continue
        if is_loss(node):
            yield _loss(decisions, node, places)
            continue
        for weight in _weights(node):
            row = by_name[decisions.program.parameters[weight.name]]
            name = decisions.blocks.representative.get(weight.name, weight.name)
            if name not in uneven:
                uneven[name] = reasons.is_uneven(weight)
            yield _layer(decisions, node, row, uneven[name], places)


def _weights(node: fx.Node) -> list[fx.Node]:
    if is_linear(node) or node.target in CONVOLUTIONS or node.target is aten.embedding.default:
        return [weight_of(n) for n in node.all_input_nodes if holds_weight(n) and n.meta["val"].dim() > 1]
    return []


def _layer(decisions: Decisions, node: fx.Node, row: ParameterPlan, uneven: bool, places: Places) -> Diagnostic:
    words = op_words(node)
    cut = f"sharded ({row.style})" if row.dim is not None else "not sharded"
    what = f"{words} {list(row.shape)} is {cut}: {row.reason.removeprefix(f'{words}: ')}"
    is_warning = uneven and not row.reason.startswith("override")
    glob = glob_of(row.name.rpartition(".")[0])
    fix = f'choose such a tp, or accept replication with overrides: {{"{glob}": replicate}}' if is_warning else ""
    return Diagnostic("warning" if fix else "info", what, places.text(node), fix)


def _loss(decisions: Decisions, node: fx.Node, places: Places) -> Diagnostic:
    classes = int(node.all_input_nodes[0].meta["val"].shape[-1])
    option = decisions.placements.options[node.name]
    if option.form is Form.CLASSES:
        padding = option.args[0].padding
        padded = f", padded by {padding}" if padding else ""
        scalars = 4 if arguments(node).get("label_smoothing") else 3
        return Diagnostic(
            "info",
            f"{op_name(node)} over {classes} classes{padded} is sharded (vocab): logits are never gathered, "
            f"ranks exchange {scalars} scalars per token",
            places.text(node),
        )
    why = "its logits are replicated"
    if classes % decisions.mesh.tp:
        why += f"; {classes} classes are not divisible by tp = {decisions.mesh.tp}, and too few to pad"
    return Diagnostic("info", f"{op_name(node)} over {classes} classes is not sharded: {why}", places.text(node))


def _choose(tp: list[int]) -> str:
    return f"choose tp from {{{', '.join(map(str, tp))}}}"


def summary_row(decisions: Decisions, parameters: tuple[ParameterPlan, ...]) -> Summary:
    """Shares of matrix-product FLOPs and of parameter elements that are cut over tp."""
    total = cut = 0
    for node in decisions.program.graph.graph.nodes:
        if node.op == "call_function":
            flops = node_flops(node)
            total += flops
            cut += 0 if decisions.placements.options[node.name].whole else flops
    elements = sum(p.num_elements for p in parameters)
    sharded = sum(p.num_elements for p in parameters if p.dim is not None)
    return Summary(cut / total if total else 0.0, sharded / elements if elements else 0.0, elements)
