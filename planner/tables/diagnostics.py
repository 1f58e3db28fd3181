"""Diagnostics for the user: how each linear, embedding and loss is sharded or why not, and inexact terms.

warning   sizes that keep a layer replicated, attention sharded in some blocks only, inexact loss terms
info      everything else, one row for each layer; the tables fold those of repeated blocks

See ``op_notes`` for notes on single ops, and ``experts`` for those on experts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from passes.blocks.blocks import Places, glob_of
from passes.partition.typings.base import Form
from passes.program.ops.aten import arguments
from passes.program.ops.groups import CONVOLUTIONS
from passes.program.program import Program
from passes.program.weights import matrices_read
from passes.rules.flops import node_flops
from planner.capture.model.hub_format import HubFormat, stored_in
from planner.decisions import Decisions
from planner.placement.attention import AttentionSite
from planner.placement.candidates import nearest_tp
from planner.recompute.decide import op_name
from planner.sharding.parameters import ParameterPlan
from planner.tables.experts import expert_notes
from planner.tables.op_notes import inferred, kernels, norms, own_backwards, rule_of_own, unrolled, without_rule
from planner.tables.reasons import Reasons, is_linear, is_loss, op_words
from planner.tables.tables import Diagnostic, Summary, remark, warning

aten = torch.ops.aten


def diagnostic_rows(
    decisions: Decisions,
    parameters: tuple[ParameterPlan, ...],
    sites: tuple[AttentionSite, ...],
    reasons: Reasons,
    places: Places,
) -> tuple[Diagnostic, ...]:
    """Return all diagnostics of the decisions without duplicates, warnings first."""
    rows = [
        *_notes(decisions),
        *_sequences(decisions),
        *batch_notes(decisions),
        *_untrained(decisions.program),
        *_skipped(decisions),
        *inferred(decisions),
        *own_backwards(decisions, places),
        *kernels(decisions, places),
        *norms(decisions, places),
        *unrolled(decisions),
        *expert_notes(decisions, parameters, places),
    ]
    if decisions.mesh.tp > 1:
        rows += [*_attention(decisions, sites, places), *without_rule(decisions)]
        rows += _layers(decisions, parameters, reasons, places)
    unique = dict.fromkeys(rows)
    return tuple(sorted(unique, key=lambda row: row.level == "info"))


def _sequences(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield a note on the shard of each sequence that a cp rank has."""
    context = decisions.context
    for length in context.lengths:
        yield remark(
            f"sequences of {length} tokens are sharded over cp {context.cp}: {length // context.cp} tokens on a "
            f"rank, in 2 of {2 * context.cp} chunks",
            "mesh.cp",
        )


def stored_notes(hub: HubFormat, parameters: tuple[ParameterPlan, ...]) -> Iterator[Diagnostic]:
    """Yield notes on quantised weights of a Hub directory: their format, and conversions that need the full tensor."""
    if kind := stored_in(hub.config):
        dtypes = ", ".join(dict.fromkeys(row.dtype for row in parameters))
        yield remark(f"the weights are stored in {kind}; they are trained and exported in {dtypes}")
    for op, elements in hub.made_whole.items():
        size = elements * getattr(torch, parameters[0].dtype).itemsize
        what = f"stored tensors are converted by {op}, which has no rule for parts"
        yield remark(f"{what}: it reads {size:,} bytes whole, and so does each rank that needs a part")


def _notes(decisions: Decisions) -> Iterator[Diagnostic]:
    for note in decisions.program.notes:
        yield warning(note)
    for what, where in decisions.program.rewrites:
        yield remark(what, str(where))
    for assumption in decisions.program.assumptions:
        yield remark(str(assumption), str(assumption.where))


MOST_NAMED = 4


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _untrained(program: Program) -> Iterator[Diagnostic]:
    """Yield a warning for parameters that require a gradient and get none: they never change, as in one process."""
    names = program.untrained
    if names:
        yield warning(
            f"{len(names)} parameters get no gradient and are not updated: {_some(names)}",
            names[0].rpartition(".")[0],
            "set requires_grad_(False) on them if this is intended",
        )


def _skipped(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield diagnostics for parameters that one process does not update in a step that selects no rows for them."""
    resting = decisions.resting
    if resting:
        what = (
            f"{len(resting)} parameters are not updated in a step in which no token chooses their expert, as in one "
            "process"
        )
        yield remark(what, next(iter(resting)).rpartition(".")[0])
    names = sorted(decisions.program.skipped - resting.keys() - _always_chosen(decisions))
    if names:
        yield warning(
            f"in a step that selects no rows for {_some(names)}, one process does not update them; here weight decay "
            "and momentum still apply",
            names[0].rpartition(".")[0],
            "read them in every step, without a branch on the selection",
        )


def _always_chosen(decisions: Decisions) -> set[str]:
    """Return the names of stacked expert weights: every token chooses some expert of the stack."""
    weights = [weight for layer in decisions.experts.layers if layer.top_k for weight in layer.weights]
    return {decisions.program.parameters[name] for weight in weights if weight.dim >= 0 for name in weight.nodes}


_EXACT = (
    "set batch.statistics: global, give each dp rank one microbatch (batch.micro = global / dp), or write the "
    "loss as a sum divided by a count"
)
# field of LossTerms → level, text with a field for the place, fix (if empty: give the op a rule)
_OF_TERMS = {
    "counted_first": (
        "info",
        "the loss is not a sum over tokens at {}: all forwards of a step run twice, first to count its sums over the "
        "global batch",
        "for one forward, give each dp rank one microbatch (batch.micro = global / dp), or set batch.statistics: "
        "microbatch, which is not exact",
    ),
    "inexact": (
        "warning",
        "the loss is not a sum over tokens at {}: it is averaged over microbatches",
        _EXACT,
    ),
    "added": (
        "warning",
        "the loss is not a sum over tokens at {}: its values of the microbatches are added up",
        _EXACT,
    ),
    "doubts": (
        "warning",
        "{} in the loss has a constant that may depend on the batch size: the plan uses its value for one microbatch",
        "keep one microbatch, or divide by a count of the labels, such as mask.sum()",
    ),
    "unknown": (
        "warning",
        "{} has no rule: if it mixes the sequences of a batch, each microbatch sees only its own",
        "",
    ),
    "mixed": (
        "warning",
        "{} mixes the sequences of a batch: each microbatch sees only its own",
        "keep one microbatch (batch.micro = batch.global, dp: 1) if the sequences must stay together",
    ),
}


def batch_notes(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield diagnostics for terms of the loss that are not simply summed over microbatches."""
    for terms, (level, words, fix) in _OF_TERMS.items():
        for what, where in getattr(decisions.terms, terms):
            yield Diagnostic(level, words.format(what), str(where), fix or rule_of_own(what))


def _attention(decisions: Decisions, sites: tuple[AttentionSite, ...], places: Places) -> Iterator[Diagnostic]:
    for site in sites:
        if not site.is_cut:
            tp = nearest_tp([site.heads], decisions.mesh.tp) if site.heads else [1]
            yield warning(
                f"this attention is replicated on every rank: {site.why_whole(decisions.mesh.tp)}",
                places.text(site.node),
                "" if site.divides(decisions.mesh.tp) else f"choose tp from {{{', '.join(map(str, tp))}}}",
            )


# ---- layers


def _layers(
    decisions: Decisions, parameters: tuple[ParameterPlan, ...], reasons: Reasons, places: Places
) -> Iterator[Diagnostic]:
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
        return matrices_read(node)
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
        return remark(
            f"{op_name(node)} over {classes} classes{padded} is sharded (vocab): logits are never gathered, "
            f"ranks exchange {scalars} scalars per token",
            places.text(node),
        )
    why = "its logits are replicated"
    if classes % decisions.mesh.tp:
        why += f"; {classes} classes are not divisible by tp = {decisions.mesh.tp}, and too few to pad"
    return remark(f"{op_name(node)} over {classes} classes is not sharded: {why}", places.text(node))


def summary_row(decisions: Decisions, parameters: tuple[ParameterPlan, ...]) -> Summary:
    """Return the shares of matrix-product FLOPs and of parameter elements that are sharded over tp."""
    total = cut = 0
    for node in decisions.program.graph.graph.nodes:
        if node.op == "call_function":
            flops = node_flops(node)
            total += flops
            cut += 0 if decisions.placements.options[node.name].whole else flops
    elements = sum(p.num_elements for p in parameters)
    sharded = sum(p.num_elements for p in parameters if p.dim is not None)
    return Summary(cut / total if total else 0.0, sharded / elements if elements else 0.0, elements)
