"""Make the loss of a microbatch its share of the loss of the global batch, so that shares simply add up.

A model writes a mean over its batch. Over microbatches and data-parallel ranks the mean of means is wrong as soon as
they hold different numbers of valid tokens. So means become sums over global counts, which depend on the inputs alone
and are known before the first forward:

    cross_entropy(mean)       → cross_entropy(sum) / Σ over the global batch of (targets ≠ ignore_index)
    a / mask.sum()            → a's share / Σ over the global batch of mask.sum()
    mean, mse_loss(mean) …    → itself / number of microbatches in the global batch     (equal sizes: exact)
    a + b, a·c, −a, casts     → term by term
    anything else             → itself / number of microbatches, and a warning that names the line

Leaves:  a graph with one placeholder for each count, and a second graph that computes the counts of one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from planner.capture import Program
from planner.source_lines import where_of

aten = torch.ops.aten

MEAN, SUM = 1, 2
PASS_THROUGH = {aten.to.dtype, aten.reshape.default, aten.clone.default, aten.contiguous.default, aten.neg.default}
MEANS = {
    aten.mean.default,
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.binary_cross_entropy.default,
    aten.kl_div.default,
}
ADDITIVE = {aten.sum.default, aten.sum.dim_IntList, aten.count_nonzero.default}


@dataclass
class LossTerms:
    """Placeholders of the counts, in order; the counts' graph with its batch keys; what could not be made exact."""

    denominators: list[str] = field(default_factory=list)
    counts: fx.GraphModule | None = None
    count_inputs: tuple[str, ...] = ()
    inexact: list[tuple[str, Any]] = field(default_factory=list)


def share_loss(program: Program, num_microbatches: int) -> LossTerms:
    """Rewrite ``program``'s loss in place; ``num_microbatches``: of the global batch, over all dp ranks."""
    rewriter = _Rewriter(program, num_microbatches)
    loss = program.node(program.loss)
    share = rewriter.share(loss)
    program.graph.graph.output_node().args = ((share,),)
    program.loss = share.name
    terms = rewriter.finish()
    program.graph.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    program.graph.recompile()
    program.__dict__.pop("_nodes", None)
    return terms


class _Rewriter:
    """Owns the counts found so far."""

    def __init__(self, program: Program, num_microbatches: int) -> None:
        self.program, self.total = program, num_microbatches
        self.graph = program.graph.graph
        self.counted: list[fx.Node] = []
        self.terms = LossTerms()
        self.from_inputs = _input_only(program)

    def share(self, node: fx.Node) -> fx.Node:
        """A node whose values over the microbatches add up to ``node`` over the global batch."""
        target = node.target
        if node.op != "call_function" or not node.meta.get("grad"):
            return self._average(node)
        if target is aten.cross_entropy_loss.default or target is aten.nll_loss_nd.default:
            return self._cross_entropy(node)
        if target in PASS_THROUGH:
            return self._again(node, [self.share(self._input(node, 0)), *node.args[1:]])
        if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            parts: Any = node.args
            return self._again(node, [self.share(a) if isinstance(a, fx.Node) else a / self.total for a in parts])
        if target in ADDITIVE:
            return node
        if target in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar):
            return self._scaled(node)
        if target in MEANS and _reduction(node) == MEAN:
            return self._average(node)
        return self._inexact(node)

    def _input(self, node: fx.Node, position: int) -> fx.Node:
        value = node.args[position]
        assert isinstance(value, fx.Node)
        return value

    def _again(self, node: fx.Node, args: list[Any]) -> fx.Node:
        if list(node.args) == args:
            return node
        return self._emit(node, node.target, args, dict(node.kwargs))

    def _emit(self, like: fx.Node, target: Any, args: list[Any], kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.graph.inserting_before(self.graph.output_node()):
            new = self.graph.call_function(target, tuple(args), kwargs or {})
        new.meta = dict(like.meta)
        return new

    def _average(self, node: fx.Node) -> fx.Node:
        return node if self.total == 1 else self._emit(node, aten.div.Tensor, [node, self.total])

    def _inexact(self, node: fx.Node) -> fx.Node:
        if self.total > 1:
            self.terms.inexact.append((str(node.target), where_of(node)))
        return self._average(node)

    def _scaled(self, node: fx.Node) -> fx.Node:
        """a·b or a/b where one factor is a number, is the same for all microbatches, or is a count of inputs."""
        a, b = node.args[0], node.args[1]
        if isinstance(a, fx.Node) and (not isinstance(b, fx.Node) or self._is_constant(b)):
            return self._again(node, [self.share(a), b])
        if (
            node.target is aten.mul.Tensor
            and isinstance(a, fx.Node)
            and isinstance(b, fx.Node)
            and self._is_constant(a)
        ):
            return self._again(node, [a, self.share(b)])
        if node.target is aten.div.Tensor and isinstance(a, fx.Node) and isinstance(b, fx.Node):
            count = self._global_count(b)
            if count is not None:
                return self._again(node, [self.share(a), count])
        return self._inexact(node)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether the value is made of constants alone (no batch tensor, no parameter)."""
        return node.name in self.from_inputs and not self.from_inputs[node.name]

    def _global_count(self, node: fx.Node) -> fx.Node | None:
        """The same value over the global batch: a sum of inputs, perhaps clamped or cast after."""
        if node.name not in self.from_inputs:
            return None
        if node.target in ADDITIVE and node.meta["val"].dim() == 0:
            return self._denominator(node, node)
        if node.target in (aten.to.dtype, aten.clamp.default, aten.clamp_min.default, aten.reshape.default):
            inner = self._global_count(self._input(node, 0))
            return None if inner is None else self._again(node, [inner, *node.args[1:]])
        return None

    def _denominator(self, count: fx.Node, like: fx.Node) -> fx.Node:
        """A placeholder that will hold Σ ``count`` over the global batch, cast to the dtype of ``like``."""
        if count not in self.counted:
            self.counted.append(count)
            last = [n for n in self.graph.nodes if n.op == "placeholder"][-1]
            with self.graph.inserting_after(last):
                holder = self.graph.placeholder(f"denominator_{len(self.counted) - 1}")
            holder.meta = {"val": torch.empty((), dtype=torch.float64, device="meta"), "grad": False}
            self.terms.denominators.append(holder.name)
        name = self.terms.denominators[self.counted.index(count)]
        holder = next(n for n in self.graph.nodes if n.name == name)
        dtype = like.meta["val"].dtype
        new = self._emit(like, aten.to.dtype, [holder, dtype])
        new.meta["val"], new.meta["grad"] = torch.empty((), dtype=dtype, device="meta"), False
        return new

    def _cross_entropy(self, node: fx.Node) -> fx.Node:
        names = ["self", "target", "weight", "reduction", "ignore_index", "label_smoothing"]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        target, reduction = given["target"], given.get("reduction", MEAN)
        if reduction == SUM:
            return node
        if reduction != MEAN or target.name not in self.from_inputs:
            return self._inexact(node)
        if target.meta["val"].is_floating_point():
            return self._average(node)
        count = self._valid_tokens(target, given.get("weight"), int(given.get("ignore_index", -100)))
        order = [given["self"], target, given.get("weight"), SUM, *[given[k] for k in names[4:] if k in given]]
        if "label_smoothing" in given and "ignore_index" not in given:
            order.insert(4, -100)
        total = self._emit(node, node.target, order)
        return self._emit(node, aten.div.Tensor, [total, self._denominator(count, node)])

    def _valid_tokens(self, target: fx.Node, weight: fx.Node | None, ignore_index: int) -> fx.Node:
        """Σ (target ≠ ignore_index), or the sum of the valid tokens' class weights."""

        def emit(op: Any, args: list[Any], val: torch.Tensor) -> fx.Node:
            new = self._emit(target, op, args)
            new.meta["val"], new.meta["grad"] = val, False
            return new

        shape = target.meta["val"].shape
        valid = emit(aten.ne.Scalar, [target, ignore_index], torch.empty(shape, dtype=torch.bool, device="meta"))
        if weight is not None:
            safe = emit(aten.mul.Tensor, [target, valid], torch.empty(shape, dtype=torch.int64, device="meta"))
            each = emit(
                aten.index.Tensor, [weight, [safe]], torch.empty(shape, dtype=weight.meta["val"].dtype, device="meta")
            )
            valid = emit(aten.mul.Tensor, [each, valid], each.meta["val"])
        return emit(aten.sum.default, [valid], torch.empty((), dtype=torch.int64, device="meta"))

    def finish(self) -> LossTerms:
        """Split off the graph of the counts: it reads batch tensors (and constants) alone."""
        if self.counted:
            needed = _ancestors(self.counted)
            graph, env = fx.Graph(), {}
            for node in self.graph.nodes:
                if node in needed:
                    env[node] = graph.node_copy(node, lambda n: env[n])
            graph.output(tuple(env[n] for n in self.counted))
            self.terms.counts = fx.GraphModule(torch.nn.Module(), graph)
            holders = [n for n in self.graph.nodes if n in needed and n.op == "placeholder"]
            self.terms.count_inputs = tuple(n.name for n in holders)
        return self.terms


def _reduction(node: fx.Node) -> int:
    """The reduction code of a loss op (1 is mean); a plain mean counts as one."""
    names = [a.name for a in node.target._schema.arguments]  # pyright: ignore
    if "reduction" not in names:
        return MEAN
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return int(given.get("reduction", MEAN))


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _input_only(program: Program) -> dict[str, bool]:
    """Nodes that depend on batch tensors, buffers and constants alone → whether on a batch tensor."""
    found: dict[str, bool] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            if node.name not in program.parameters:
                found[node.name] = node.name in program.inputs
        elif node.op == "call_function" and all(n.name in found for n in node.all_input_nodes):
            found[node.name] = any(found[n.name] for n in node.all_input_nodes)
    return found
