"""Rewrite the export for the planner: with all rows, and independent of the answers to questions about data.

    pad = ids.eq(1)
    if not pad.any(): pad = None        captured is the branch with the mask, for every batch

Folding proves that a branch without its mask is equal if the mask selects nothing: the mask is all false, and so are
values made of such values alone; 1 − pad is all ones; an op that adds zeros, multiplies by ones, fills nothing or
attends with a neutral mask equals its operand. If folding fails, both graphs run in float64 on three drawn batches,
forward and backward, with the mask set to false.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import Where
from passes.program.known_values import computed, follows
from passes.program.ops.aten import aten, named, nodes_in, packet_of
from passes.program.program import Assumption
from passes.program.walks import operands, walk
from planner.capture.data_dependence import calls_in, not_captured
from planner.capture.eager_trials import CHEAP
from planner.capture.graphs_equal import InFloat64, drawn, widened
from planner.capture.model.exchange import tensors_in
from planner.capture.selection.dense import AllRows
from planner.capture.selection.features import scatters
from planner.capture.selection.places import is_dynamic
from planner.capture.selection.questions import Questions
from planner.capture.selection.space import Keys, key_of_mask

TOLD = "selected rows are computed densely: all rows, with a mask on the result"
BRANCHED = "captured with its mask for every batch: without it, the result is the same where the mask selects nothing"
EMPTY_FIX = (
    "branches such as `if mask.any():` may skip only computation on the selected rows: with no row selected, the "
    "forward must give the same result without the branch"
)
MOST_ELEMENTS = 1 << 22
NUM_TRIALS = 3
TOLERANCE = 1e-9
_NEUTRAL = {
    aten.mul: 1, aten.add: 0, aten.logical_and: 1, aten.logical_or: 0, aten.div: 1, aten.sub: 0,
    aten.__and__: 1, aten.bitwise_and: 1, aten.__or__: 0, aten.bitwise_or: 0,
}  # fmt: skip


def compute_all_rows(
    module: fx.GraphModule,
    asked: Questions,
    others: Iterable[tuple[Questions, fx.GraphModule]],
    constants: Mapping[str, Tensor],
    inputs: Sequence[str],
) -> tuple[list[tuple[str, Where]], list[Assumption]]:
    """Rewrite ``module`` so that no shape depends on data; return its notes for the user, and assumptions.

    ``others``: exports with other answers than ``asked`` got. ``constants``: by placeholder. ``inputs``: of the batch.
    Raises PlanError if rows that data selects are mixed, and if an answer changes more than the choice of written rows,
    or a mask that selects nothing there.
    """
    if not asked.asked and not is_dynamic(module) and not any(map(scatters, calls_in(module))):
        return [], []
    found, is_branched = AllRows(module, (), inputs, constants), False
    for questions, other in others:
        one, two = (AllRows(m, e, inputs, constants) for m, e in ((module, questions.empty), (other, ())))
        if _are_same(one, two, questions.empty):
            continue
        is_branched = True
        full, bare = fx.GraphModule(module, found.graph), fx.GraphModule(other, two.graph)
        if not is_same_without(full, bare, questions.empty, constants):
            what = "its computation depends on whether any row is selected (data-dependent)"
            raise not_captured(what, asked.asked[0], EMPTY_FIX)
    module.graph = found.graph
    module.delete_all_unused_submodules()
    module.recompile()
    told = [*((TOLD, where) for where in found.told), *((BRANCHED, where) for where in asked.asked if is_branched)]
    return told, [*found.features.checks.values()]


def skipped_parameters(
    module: fx.GraphModule, others: Iterable[tuple[Questions, fx.GraphModule]], fqn_of: Mapping[str, str]
) -> frozenset[str]:
    """Return parameters that the forward reads, but not if no mask selects any row; before all rows are computed. Their
    gradient is then not needed: it is None in one process. ``fqn_of``: of each placeholder, the same for tied ones.
    """
    read = _read(module, fqn_of)
    return read.difference(*(_read(other, fqn_of) for _, other in others)) if others else frozenset()


def _read(module: fx.GraphModule, fqn_of: Mapping[str, str]) -> frozenset[str]:
    holders = module.graph.find_nodes(op="placeholder")
    return frozenset(fqn_of[node.name] for node in holders if node.users and node.name in fqn_of)


def _are_same(expected: AllRows, found: AllRows, empty: set[int]) -> bool:
    """Return whether both compute the same, and have the same masks among those that were said to be empty."""
    masks = [{number: key for key, number in rows.asked.items() if number in empty} for rows in (expected, found)]
    keys = [list(map(Keys(), _results(rows.graph))) for rows in (expected, found)]
    return masks[0] == masks[1] and keys[0] == keys[1]


def is_same_without(
    module: fx.GraphModule, other: fx.GraphModule, empty: Collection[int], constants: Mapping[str, Tensor]
) -> bool:
    """Return whether both compute the same if the masks with these numbers select nothing."""
    masks = [_masks(m, empty) for m in (module, other)]
    if masks[0] != masks[1]:
        return False
    keys = [list(map(_Folded(empty), _results(m.graph))) for m in (module, other)]
    return keys[0] == keys[1] or _are_equal_when_run(module, other, empty, constants)


def _masks(module: fx.GraphModule, empty: Collection[int]) -> dict[int, str]:
    keys = Keys()
    return {n.meta["asked"]: key_of_mask(keys, n) for n in module.graph.nodes if n.meta.get("asked") in empty}


def _results(graph: fx.Graph) -> list[fx.Node]:
    return nodes_in(graph.output_node().args)


class _Folded(Keys):
    """Keys of values if some masks are all false. ``_filled``: values with one number everywhere."""

    def __init__(self, empty: Collection[int]) -> None:
        super().__init__()
        self._empty, self._filled = empty, dict[fx.Node, Any]()

    def _made(self, node: fx.Node) -> str:
        number = self._number(node)
        if number is not None:
            self._filled[node] = number
            return f"{number} {tuple(node.meta['val'].shape)} {node.meta['val'].dtype}"
        same = self._operand(node)
        if same is not None:
            return self._known[same]
        if packet_of(node.target) is not aten.scaled_dot_product_attention:
            return super()._made(node)
        given = dict(sorted(named(node).items()))
        mask: Any = given.pop("attn_mask", None)
        masks = mask is not None and self._filled.get(mask) != (mask.meta["val"].dtype == torch.bool)
        return self._hashed(node, given | {"attn_mask": mask} if masks else given)

    def _number(self, node: fx.Node) -> Any:
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or val.numel() > MOST_ELEMENTS or not val.numel():
            return None
        if node.meta.get("asked") in self._empty:
            return False
        read = node.all_input_nodes[:1] if packet_of(node.target) is aten.type_as else node.all_input_nodes
        if not follows(node) or any(n not in self._filled for n in read):
            return None
        with suppress(Exception):
            made = computed(node, self._full)
            return made.flatten()[0].item() if bool((made == made.flatten()[0]).all()) else None
        return None

    def _full(self, node: fx.Node) -> Tensor:
        val = node.meta["val"]
        return torch.tensor(self._filled.get(node, 0), dtype=val.dtype).expand(val.shape).contiguous()

    def _operand(self, node: fx.Node) -> fx.Node | None:
        """Return the operand that the value equals, or None."""
        val: Any = node.meta.get("val")
        for x, filled in self._pairs(node) if node.op == "call_function" and isinstance(val, Tensor) else ():
            own = x.meta.get("val") if isinstance(x, fx.Node) else None
            if filled and isinstance(own, Tensor) and (val.shape, val.dtype) == (own.shape, own.dtype):
                return x
        return None

    def _pairs(self, node: fx.Node) -> list[tuple[Any, bool]]:
        """Return operands that the value may equal, and whether the other operands make it equal."""
        packet, args = packet_of(node.target), [*node.args, None, None, None][:3]
        if packet is aten.masked_fill:
            return [(args[0], self._is(args[1], 0))]
        if packet is aten.where:
            return [(args[1], self._is(args[0], 1)), (args[2], self._is(args[0], 0))]
        if packet is aten.index_put:
            masks: Any = args[1]
            return [
                (args[0], any(n is not None and n.meta["val"].dtype == torch.bool and self._is(n, 0) for n in masks))
            ]
        if node.kwargs:  # alpha, rounding_mode
            return []
        neutral = _NEUTRAL.get(packet)
        if packet in (aten.__and__, aten.bitwise_and, aten.__or__, aten.bitwise_or):
            neutral = neutral if node.meta["val"].dtype == torch.bool else None  # of other integers all bits count
        first = None if packet in (aten.div, aten.sub) else neutral
        return [(args[0], self._is(args[1], neutral)), (args[1], self._is(args[0], first))]

    def _is(self, value: Any, number: int | None) -> bool:
        known = self._filled.get(value) if isinstance(value, fx.Node) else value
        return number is not None and isinstance(known, (int, float)) and known == number


def _are_equal_when_run(
    module: fx.GraphModule, other: fx.GraphModule, empty: Collection[int], constants: Mapping[str, Tensor]
) -> bool:
    holders = {n.name: n.meta.get("val") for m in (module, other) for n in m.graph.find_nodes(op="placeholder")}
    own = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]
    batch = max((v.numel() for v in own if isinstance(v, Tensor) and not v.is_floating_point()), default=1)
    if sum(v.numel() for v in holders.values() if isinstance(v, Tensor)) * batch > 10 * CHEAP:
        return False
    with suppress(Exception), torch.random.fork_rng(devices=[]):
        return all(_agree(module, other, empty, _drawn(holders, constants, seed)) for seed in range(NUM_TRIALS))
    return False


def _drawn(holders: Mapping[str, Any], constants: Mapping[str, Tensor], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    given = {name: drawn(val, generator) for name, val in holders.items() if isinstance(val, Tensor)}
    return {**holders, **given, **{name: widened(value) for name, value in constants.items() if name in holders}}


def _agree(module: fx.GraphModule, other: fx.GraphModule, empty: Collection[int], values: Mapping[str, Any]) -> bool:
    (first, gradients), (second, expected) = (_run(m, empty, values) for m in (module, other))
    pairs = [*zip(first, second, strict=True), *((gradients[name], expected[name]) for name in gradients)]
    both = [[torch.zeros(()) if x is None else x for x in pair] for pair in pairs]
    return all(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE) for a, b in both)


def _run(
    module: fx.GraphModule, empty: Collection[int], values: Mapping[str, Any]
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Return the results, and the gradients of a random product with them."""
    torch.manual_seed(0)
    leaves = {n: v.detach().requires_grad_(v.is_floating_point()) for n, v in values.items() if isinstance(v, Tensor)}
    given = {**values, **leaves}
    made = _WithoutMasks(module, empty).run(*(given[n.name] for n in module.graph.find_nodes(op="placeholder")))
    results = tensors_in(made)
    if not all(bool(r.isfinite().all()) for r in results):
        raise ArithmeticError("a result is not finite")
    total = sum((r.sin().sum() for r in results if r.requires_grad), torch.zeros((), dtype=torch.float64))
    floats = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(total, list(floats.values()), allow_unused=True) if total.requires_grad else ()
    return [r.detach() for r in results], dict(zip(floats, gradients, strict=False))


class _WithoutMasks(InFloat64):
    """Runs the calls that the results need, in float64, with the masks all false."""

    def __init__(self, module: fx.GraphModule, empty: Collection[int]) -> None:
        super().__init__(module)
        self._empty, self._needed = empty, set(walk([module.graph.output_node()], operands))

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "placeholder" and n not in self._needed:
            return None
        made = super().run_node(n)
        return torch.zeros_like(made) if n.meta.get("asked") in self._empty else made
