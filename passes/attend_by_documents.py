"""Attention that a mask keeps within documents runs block by block (passes.ops.documents).

    and = __and__(le(place_j, place_i), eq(document_j, document_i))          [b, 1, s, t]
    attention(q, k, v, and)   →   runs = runs_of_rows(mask, [place_i, place_j, …])     [b, s, 3]
                                  attention_by_documents(q, k, v, runs, …, mask, [place_i, place_j, …])

A mask that pointwise ops make of smaller values becomes a graph of its own, which is run for some rows at a time.

Needs:   ops of this rank's sizes (passes.localize), and exchanges over cp (passes.exchanges).
"""

from typing import Any

import torch
from torch import fx

from passes.base import LowerContext, StageGraph
from passes.ops.attention import attention_arguments, shared_key_attention
from passes.ops.documents import MaskRows, attention_by_documents, runs_of_rows
from passes.ops.gathered_attention import gathered_attention
from passes.parts import module_of
from passes.program.ops.aten import aten, is_pointwise, ops_named, shape_of
from passes.program.ops.groups import WITH_SIZES
from passes.program.walks import in_order, operands, walk

SDPA = aten.scaled_dot_product_attention.default
FACTORIES = frozenset(ops_named("full ones zeros"))


def attend_by_documents(stage: StageGraph, context: LowerContext) -> None:
    """Rewrite attention in place: that of a rank alone becomes the op; ops that gather or pick keys get an option."""
    documents, masks = context.lowering.documents, dict[fx.Node, tuple[fx.Node, dict[str, Any]]]()
    for node in list(stage.graph.nodes):
        if node.op != "call_function" or node.meta.get("origin") not in documents.attentions:
            continue
        mask = _mask(node)
        if mask not in masks:
            masks[mask] = _in_rows(stage, mask) or (mask, {})
        runs, options = masks[mask]
        node.replace_input_with(mask, runs)
        if node.target in (gathered_attention, shared_key_attention):
            node.kwargs = {**node.kwargs, "documents": documents.mean, **options}
        elif node.target is SDPA:
            given: dict[str, Any] = attention_arguments(node.args, node.kwargs)
            options = {name: given[name] for name in ("scale", "enable_gqa") if given.get(name)} | options
            node.target = attention_by_documents
            node.args = (*node.args[:3], runs, documents.mean)
            node.kwargs = options


def _mask(node: fx.Node) -> Any:
    if node.target is SDPA:
        return attention_arguments(node.args, node.kwargs)["mask"]
    position = 3 if node.target is gathered_attention else 4
    return node.args[position] if len(node.args) > position else node.kwargs["mask"]


def _in_rows(stage: StageGraph, mask: fx.Node) -> tuple[fx.Node, dict[str, Any]] | None:
    """Return the runs of the mask, and the options of an op that reads them; None if the mask is a whole one."""
    shape, found = shape_of(mask), _members(mask)
    if found is None or len(shape) not in (2, 4) or (len(shape) == 4 and shape[1] != 1):
        return None
    members, given = found
    reads: dict[fx.Node, fx.Node] = {node: _read(stage, node) for node in given}
    module = module_of(members, given, [mask])
    for node in module.graph.nodes:
        if node.target in WITH_SIZES:
            sizes = list(node.args[1])
            sizes[-2] = -1 if len(shape_of(node.args[0])) > 1 else 1
            node.update_arg(1, sizes)
    module.recompile()
    name, is_cut = f"rows_of_{mask.name}", [shape_of(node)[-2:-1] == shape[-2:-1] for node in reads.values()]
    setattr(stage.root, name, MaskRows(module, is_cut, shape))
    with stage.graph.inserting_after(mask):
        runs = stage.graph.call_function(runs_of_rows, (None, list(reads.values())))
    with stage.graph.inserting_before(runs):
        rows = stage.graph.create_node("get_attr", name)
    runs.update_arg(0, rows)
    value, sequences = mask.meta["val"], shape[0] if len(shape) == 4 else 1
    runs.meta = {**mask.meta, "val": value.new_empty((sequences, shape[-2], 3), dtype=torch.int64)}
    return runs, {"rows": rows, "inputs": list(reads.values())}


def _members(mask: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return the ops that make values [.., s, t], in their order, and the values that they read; None if another op
    makes one."""
    size = shape_of(mask)[-2:]

    def is_given(node: fx.Node) -> bool:
        return shape_of(node)[-2:] != size or node.target in FACTORIES

    def is_by_rows(node: fx.Node) -> bool:
        """Return whether each row of the result is made of that row of each operand: dims are aligned from the last."""
        is_plain = is_pointwise(node.target) or node.target is aten.expand.default
        return is_plain or (node.target is aten.reshape.default and shape_of(node.all_input_nodes[0])[-2:] == size)

    # an op that is not by rows may read a handle, which has no shape
    read = list(walk([mask], operands, stop=lambda node: is_given(node) or not is_by_rows(node)))
    members = {node for node in read if not is_given(node)}
    if not all(map(is_by_rows, members)):
        return None
    return [node for node in in_order([mask]) if node in members], [node for node in read if node not in members]


def _read(stage: StageGraph, node: fx.Node) -> fx.Node:
    """Return a constant of one value as that value alone, and any other value itself."""
    if node.target not in FACTORIES or not shape_of(node):
        return node
    with stage.graph.inserting_after(node):
        one = stage.graph.node_copy(node)
    one.update_arg(0, [1] * len(shape_of(node)))
    one.meta = {**node.meta, "val": node.meta["val"].new_empty([1] * len(shape_of(node)))}
    return one
