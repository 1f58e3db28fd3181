"""Find ops that mix the sequences of a batch: there a microbatch cannot compute the values of the global batch.

    x − x.mean(0)        statistics over the batch            z @ z.T              each sequence with each other
    softmax, cumsum …    along the batch                      x[: n // 2], flip    one half against the other
    a user's own backward that does not work sequence by sequence, or (on weights alone) is not linear

The rule of an op (passes.rules) says which dims it mixes; of an op without one that is not known. Whether a dim holds
the batch is known from two captures (passes.partition.batch.align_exports). The second costs as much as the first, so
it is made only if an op could do one of these; a sum over the features, as of a norm, could not.

The dims of a value that may hold the batch follow from one capture too (``batch_runs``): a dim that is not named holds
no sequence beside another; one that is named may. An op that is not known makes all its dependents unknown.

    ids [b, t] → 0      embedding → 0      x.transpose(0, 1) → 1      x.view(b·h, t, d) → 0, in steps of h

Rows that are sorted and come back in order (passes.partition.batch.restored_orders) are not mixed.

Ops that read sequences by their places in the batch are found by passes.partition.batch.orders.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import getitem
from typing import Any

from torch import fx

from passes.partition.batch.orders import Runs, addresses, crosses
from passes.partition.batch.restored_orders import RestoredOrder, restored_orders
from passes.program.known_values import SHAPE_READERS
from passes.program.ops.aten import aten, is_pointwise, packet_of, shape_of, tensors_of
from passes.program.ops.groups import JOINS, LAID_OUT, PLACING, Ops, is_grouped
from passes.program.ops.own_backward import OwnBackward
from passes.program.program import Program
from passes.program.walks import operands, readers, walk
from passes.rules.rule import RESULT, Factor, OpRule, Role, operands_of
from passes.rules.table import rule_of
from passes.types.types import Run

# They put rows elsewhere, each by itself; passes.partition.loss.parts follows the batch through them.
ELSEWHERE = PLACING | JOINS | Ops("index gather embedding pad constant_pad_nd")

BatchDims = Callable[[fx.Node], frozenset[int] | None]  # the dims of a value that hold the batch, if known


def has_gradient(node: fx.Node) -> bool:
    return node.op == "call_function" and any(n.meta.get("grad") or n.meta.get("stopped") for n in node.all_input_nodes)


def computed_along(program: Program, on_batch: Collection[fx.Node], loss: Collection[fx.Node]) -> list[fx.Node]:
    """Return values computed from the batch outside of ``loss`` that affect gradients: those with a gradient, and
    others that they read, such as a maximum over the ids that scales an embedding, or the places that tokens take in
    turn."""
    inner = [n for n in program.graph.graph.nodes if n in on_batch and n not in loss]
    with_gradient = {n for n in inner if has_gradient(n)}
    within = set(inner)
    read = set(walk(with_gradient, operands, into=within.__contains__))
    return [n for n in inner if n in with_gradient or (n in read and n.op == "call_function")]


def is_own_loss(node: fx.Node, others: Collection[fx.Node]) -> bool:
    """Return whether a user's own backward makes a term of the loss, which is reported as one."""
    value = node.meta["val"]
    if not isinstance(node.target, OwnBackward):
        return False
    is_number = not isinstance(value, (tuple, list)) and value.dim() == 0
    return is_number and any(user.op == "output" or user in others for user in node.users)


# ---- whether an op mixes the sequences


def is_unknown(node: fx.Node) -> bool:
    """Return whether an op has no rule: it may do anything."""
    if node.op != "call_function" or _is_plain(node) or isinstance(node.target, OwnBackward):
        return False
    return any(True for _ in tensors_of(node)) and not _puts_elsewhere(node) and rule_of(node) is None


def may_mix(node: fx.Node, on_batch: Collection[fx.Node]) -> bool:
    """Decide by the op alone, as if dim 0 of each value held the batch: cheap, and true of few ops."""
    if node.op != "call_function" or _is_plain(node):
        return False
    held = [frozenset({0} if n in on_batch else ()) for n in operands_of(node)]
    if isinstance(node.target, OwnBackward):
        return not _works_by_sequence(node, held)
    return _mixes(node, held, of_products_alone=True)


def mixes(node: fx.Node, dims_of: BatchDims, larger: fx.Node | None = None) -> bool:
    """Return whether an op does mix. False if it is not known which dims hold the batch.

    ``larger``: the call of more sequences. Its index shows more places, but a rule that trials showed is noted in the
    first capture alone; a user's own backward on one sequence shows nothing about several.
    """
    held = [dims_of(n) for n in operands_of(node)]
    if any(dims is None for dims in held):
        return False
    known = [dims or frozenset[int]() for dims in held]
    if not isinstance(node.target, OwnBackward):
        if larger is None or larger.target != node.target:
            return _mixes(node, known)
        return _mixes(larger, known) or (not addresses(node) and _mixes(node, known))
    return not any(_works_by_sequence(n, known) for n in (node, larger) if n is not None)


def _is_plain(node: fx.Node) -> bool:
    """Return whether an op works by elements, or is a view: known without its rule, and most calls are."""
    return is_pointwise(node.target) or node.target in LAID_OUT


def _works_by_sequence(node: fx.Node, held: Sequence[Collection[int]]) -> bool:
    """Return whether it was shown to work part by part along the dims that hold the batch."""
    cuts: Any = node.target.facts.cuts  # pyright: ignore
    return any(
        all(dim in dims if dims else dim is None for dim, dims in zip(cut.inputs, held, strict=True)) for cut in cuts
    )


def _puts_elsewhere(node: fx.Node) -> bool:
    """Return whether an op puts rows elsewhere, or multiplies each by one of several matrices: each is by itself."""
    return node.target in ELSEWHERE or node.target is getitem or is_grouped(node.target)


def _mixes(node: fx.Node, held: Sequence[Collection[int]], *, of_products_alone: bool = False) -> bool:
    """``held``: the dims of each operand that hold the batch. Sequences of two operands may be combined in pairs;
    ``of_products_alone``: only products are asked for that."""
    if addresses(node):
        return crosses(node, held)
    rule = rule_of(node) if any(held) and not _puts_elsewhere(node) and not _is_plain(node) else None
    if rule is None:
        return False
    found = [(i, f) for i, dims in enumerate(held) for dim in dims for f in rule.along(i, dim)]
    if any(f.role is not Role.EACH for _, f in found):
        return True
    is_product = any(f.role is Role.SUM and len(f.places) > 1 for f in rule.factors)
    return (is_product or not of_products_alone) and any(pairs(rule, f, held) for _, f in found)


def pairs(rule: OpRule, factor: Factor, held: Sequence[Collection[int]]) -> bool:
    """Return whether each sequence is combined with all those of another operand."""
    for i, dims in enumerate(held):
        place = factor.at(i)
        if dims and i not in rule.unread and (place is None or place.dim not in dims):
            return True
    return False


Dims = frozenset[Run]


def batch_flow(program: Program, on_batch: Collection[fx.Node]) -> dict[fx.Node, frozenset[int] | None]:
    """Map each node to the dims that may hold the batch, of two sequences or more; None if that is not known."""
    return dims_of(batch_runs(program, on_batch))


def dims_of(flow: Runs) -> dict[fx.Node, frozenset[int] | None]:
    """Return the dims of runs."""
    return {node: None if runs is None else frozenset(dim for dim, *_ in runs) for node, runs in flow.items()}


def batch_runs(
    program: Program, on_batch: Collection[fx.Node], orders: Iterable[RestoredOrder] | None = None
) -> dict[fx.Node, frozenset[Run] | None]:
    """Return the same, each dim with the distance of two sequences along it, and their number. ``orders``: if known."""
    flow: dict[fx.Node, Dims | None] = {}
    orders = restored_orders(program.graph.graph, on_batch) if orders is None else orders
    known = {node: order for order in orders for node in (*order.inside, *order.back)}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            size = int(node.meta["val"].shape[0]) if node.name in program.inputs else 0
            flow[node] = frozenset({(0, 1, size)} if size else ())
        elif node in known:
            flow[node] = known[node].runs(flow, node)
        elif node.op == "call_function":
            flow[node] = _dims_of(node, flow) if node in on_batch else frozenset()
    return flow


def is_in_line(program: Program, node: fx.Node, run: Run, runs: Mapping[fx.Node, Dims | None]) -> bool:
    """Return whether sequences along ``run`` of a value without the batch are aligned with those of the batch in all
    ops that read both. ``runs``: those of the batch."""
    flow, made, meets = {**runs, node: frozenset({run})}, {node}, False
    for reader in program.graph.graph.nodes:
        given = made.intersection(reader.all_input_nodes) if reader.op == "call_function" else ()
        if not given:
            continue
        along = _dims_of(reader, flow)
        if not runs[reader]:
            flow[reader] = along
            made.add(reader)
        elif along != runs[reader]:
            return False
        meets |= bool(runs[reader]) and any(flow[n] for n in given)
    return meets


def _of_parts(node: fx.Node, flow: Mapping[fx.Node, Dims | None]) -> Dims | None:
    """Return the rows of the operands of a user's own backward, if it was shown to work part by part along them."""
    held = [(n, flow.get(n)) for n in operands_of(node)]
    if any(runs is None or len(runs) > 1 for _, runs in held):
        return None
    places = tuple(next((dim for dim, *_ in runs or ()), None) for _, runs in held)
    rows = {(step, count, shape_of(n)[dim]) for n, runs in held for dim, step, count in runs or ()}
    dims = [cut.dim for cut in node.target.facts.cuts if cut.inputs == places]  # pyright: ignore
    if len(rows) != 1 or not dims:
        return None
    ((step, count, size),) = rows
    is_whole = all(x.shape[dims[0]] == size for x in tensors_of(node))
    return frozenset({(dims[0], step, count)}) if is_whole else None


def _dims_of(node: fx.Node, flow: Mapping[fx.Node, Dims | None]) -> Dims | None:
    """Return a sum along the batch leaves it anywhere, and so do lost positions; an operand that gives its shape alone
    passes on the dims of the result only."""
    if isinstance(node.target, OwnBackward):
        return _of_parts(node, flow)
    rule, operands = rule_of(node), operands_of(node)
    if rule is None or any(flow.get(n) is None for n in node.all_input_nodes):
        return None
    found: set[Run] = set()
    for i, operand in enumerate(operands):
        for run in flow[operand] or ():
            carried = _carried(rule, i, run, node)
            if carried is None and i not in rule.unread:
                return frozenset((d, 1, n) for d, n in enumerate(shape_of(node)))
            found |= carried or set()
    return frozenset(found)


def _carried(rule: OpRule, operand: int, run: Run, node: fx.Node) -> set[Run] | None:
    """Return the runs in the result of the factors that hold the sequences; None where one of these is not there.

    Sequences that do not start and end with a factor, or lie unevenly on it, may be anywhere along its dim.
    """
    dim, distance, count = run
    found: set[Run] = set()
    step = 1
    for factor in rule.along(operand, dim):
        first, last, end = max(distance, step), min(distance * count, step * factor.size), step * factor.size
        if first < last or factor.size == count == 1:
            place = factor.at(RESULT)
            if place is None:
                return None
            even = first % step == 0 and last % first == 0 and end % last == 0 and first % distance == 0
            whole = (place.dim, 1, shape_of(node)[place.dim])
            found.add((place.dim, place.inner * (first // step), last // first) if even else whole)
        step = end
    return found


def follows_batch(program: Program) -> set[fx.Node]:
    """Return the nodes computed from the batch's values, not from their shapes alone."""
    inputs = [node for node in program.graph.graph.nodes if node.name in program.inputs]
    return set(walk(inputs, readers, into=lambda n: n.target not in SHAPE_READERS))


def may_repeat_batch(node: fx.Node) -> bool:
    """Return whether an op repeats all of its dim in a capture of one sequence: the first, or one behind a new dim."""
    if packet_of(node.target) is not aten.expand:
        return False
    shape, before = shape_of(node), shape_of(node.all_input_nodes[0])
    added = len(shape) - len(before)
    pairs = zip((1,) * added + before, shape, (*shape[1:], 0), strict=True)
    return any(old == 1 < new and (dim == added or then == 1) for dim, (old, new, then) in enumerate(pairs))
