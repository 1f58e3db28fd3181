"""Notes on single ops: no rule, an inferred rule, a custom backward, or a slow kernel."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from passes.blocks.blocks import Places
from passes.canonical.norms import spelled_norms
from passes.partition.typings.table import rule_of
from passes.program.ops.aten import is_random, named, packet_of, shape_of
from passes.program.ops.own_backward import OwnBackward
from passes.program.source_lines import module_of, where_of
from passes.rules.flops import node_cost
from planner.decisions import Decisions
from planner.placement.attention import AttentionSite
from planner.spec.spec import Spec
from planner.tables.tables import Diagnostic, remark, warning
from planner.trace.attention_kernels import MATH, kernel_of

aten = torch.ops.aten
_MANY, _PASSES = 1000, 32  # planning is slow beyond so many calls in a graph, and from one line of one module


def own_backwards(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """Yield a note on each custom autograd Function, which stays one op, with why it is sharded or not."""
    for node in decisions.program.graph.graph.nodes:
        if isinstance(node.target, OwnBackward):
            option, facts = decisions.placements.options[node.name], node.target.facts
            what = f"{node.target} is a custom Function with its own backward: one op"
            if decisions.mesh.tp == 1:
                yield remark(what, places.text(node))
            elif option.out.is_sharded:
                yield remark(
                    f"{what}, sharded over dim {option.out.dim}, after trials on shards, forward and backward",
                    places.text(node),
                )
            else:
                why = "" if facts.cuts else ": a trial on shards failed along every dim"
                why += "" if facts.linear else "; its backward is not linear and needs complete gradients"
                yield remark(f"{what}, replicated on every rank{why}", places.text(node))


def norms(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """Yield a note on RMS norms written as single ops: on a GPU, each op is a kernel that reads all features."""
    spelled = list(spelled_norms(decisions.program)) if decisions.on_gpu else []
    num_ops = sum(norm.num_ops for norm in spelled)
    if spelled:
        yield remark(
            f"{len(spelled)} RMS norms are spelled out, in {num_ops} ops; fuse_norms: true makes each one GPU "
            "kernel forward and one backward, which sum in another order",
            places.text(spelled[0].results[0]),
        )


def kernels(decisions: Decisions, places: Places) -> Iterator[Diagnostic]:
    """Yield a note on the attention kernel that the plan assumes, if the kernel decides which tensors are saved."""
    for node in decisions.program.graph.graph.nodes:
        if node.op != "call_function" or packet_of(node.target) is not aten.scaled_dot_product_attention:
            continue
        drops = " with dropout" if is_random(node) else ""
        if decisions.on_gpu:
            operands = [named(node)[name] for name in ("query", "key", "value", "attn_mask")]
            values: list[Any] = [None if x is None else x.meta["val"] for x in operands]
            kernel = kernel_of(*values, cudnn=decisions.cudnn)
            keeps = (
                "its scores and probabilities"
                if kernel == MATH
                else "its result and one value per row, no probabilities"
            )
            yield remark(
                f"memory of attention{drops} is that of the {kernel} kernel of a GPU, which saves {keeps}",
                places.text(node),
            )
        elif drops:
            yield remark(
                "memory of attention with dropout is that of the CPU kernel, which saves its scores and probabilities",
                places.text(node),
                "name a cluster of GPUs to plan with a GPU kernel",
            )


def unrolled(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield a note on a Python loop that the export unrolled into so many calls that planning is slow."""
    calls = [n for n in decisions.program.graph.graph.nodes if n.op == "call_function" and "stack_trace" in n.meta]
    if len(calls) >= _MANY:
        lines = Counter((module_of(n), n.meta["stack_trace"]) for n in calls)
        (module, trace), count = lines.most_common(1)[0]
        if count > _PASSES:
            node = next(n for n in calls if (module_of(n), n.meta["stack_trace"]) == (module, trace))
            yield remark(
                f"export: {len(calls):,} nodes; a loop is unrolled, {count:,} nodes are of one line",
                str(where_of(node)),
            )


def inferred(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield a note on each op with a rule that was inferred by trials, once per pattern."""
    first: dict[tuple[str, str], fx.Node] = {}
    for node in decisions.program.graph.graph.nodes:
        if "inferred" in node.meta:
            first.setdefault((str(node.target), str(node.meta["inferred"])), node)
    for (op, pattern), node in first.items():
        yield remark(
            f'{op} has no rule; by trials on random values it has "{pattern}"',
            str(where_of(node)),
            f'to say it yourself: meshwright.rule("{own_name(op)}", "{pattern}"); to replicate such ops: '
            "tensor_parallel.infer_rules: false",
        )


def without_rule(decisions: Decisions) -> Iterator[Diagnostic]:
    """Yield a warning per op and source line without a rule, with its share of the estimated work: every rank computes
    it in full."""
    nodes = [n for n in decisions.program.graph.graph.nodes if n.op == "call_function"]
    groups: dict[tuple[str, str, int], list[fx.Node]] = {}
    for node in nodes:
        if node.meta.get("grad") and rule_of(node) is None and not isinstance(node.target, OwnBackward):
            where = where_of(node)
            groups.setdefault((str(node.target), where.file, where.line), []).append(node)
    total = max(sum(map(node_cost, nodes)) if groups else 1, 1)
    for (op, *_), group in groups.items():
        times = f", {len(group)} times" if len(group) > 1 else ""
        yield warning(
            f"{op} has no rule{times} and is replicated on every rank, {sum(map(node_cost, group)) / total:.1%} of the "
            "estimated work",
            str(where_of(group[0])),
            rule_of_own(op),
        )


def rule_of_own(op: str) -> str:
    return f'if it is an op of your own, give it a rule: meshwright.rule("{own_name(op)}", "… -> …")'


def own_name(op: str) -> str:
    """Return the name under which torch.library registered an op: ``mylib::scan`` for ``mylib.scan.default``."""
    namespace, _, rest = op.partition(".")
    return f"{namespace}::{rest.removesuffix('.default')}"


def documents_notes(
    spec: Spec, decisions: Decisions, sites: tuple[AttentionSite, ...], places: Places
) -> Iterator[Diagnostic]:
    """Yield a note on attention that runs within documents only, and one on attention that masks other documents."""
    documents, program = decisions.lowering.documents, decisions.program
    if spec.data.packing != "documents":
        return
    within = [n for n in program.graph.graph.nodes if n.name in documents.attentions]
    if within:
        length = shape_of(within[0])[2] * decisions.mesh.cp
        share = f"{documents.mean / length:.0%} of the pairs of a sequence of {length}"
        how = f"for documents of {documents.mean} tokens" if documents.mean < length else "unless documents are shorter"
        fix = "" if documents.mean < length else "set data.mean_document for the predicted memory and time"
        what = f"{len(within)} attentions run within documents: {share}, {how}"
        yield remark(what, places.text(within[0]), fix)
    others = [site.node for site in sites if not any(n.name in documents.attentions for n in site.nodes)]
    if others:
        why = "" if spec.cuda_graphs.impl == "none" else ", as CUDA graphs hold the blocks of no document"
        what = (
            f"{len(others)} kinds of attention compute all pairs of a sequence and mask those of other documents{why}"
        )
        fix = "" if why else "use torch.nn.functional.scaled_dot_product_attention with a mask and without dropout"
        yield remark(what, places.text(others[0]), fix)
