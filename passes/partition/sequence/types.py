"""Type every value of a program over cp: sharded along its sequence, partial sums, or replicated on every rank.

    V(dim)   this rank's tokens         P   a partial sum         R   the same on all ranks, with partial gradients

From the first to the last: tokens are sharded where float work begins, at the trained embedding of ids or the first
product with a weight (of patches: passes.partition.sequence.flow); from there on each op takes the typing
that moves least. Values without a sharded input (positions, masks, tables made of weights) stay replicated, and are
sharded later, along the dim that a reader wants (passes.partition.sequence.versions). Weights are R, so gradients of
all replicated values are partial, and are summed with those of the weights.

Ops that read whole sequences and make as much of them: each rank computes them for all tokens, and goes on with its
own.

    conv1d, cumsum, flip, fft      the result is cut again, where the sequence stood in the operand
    cat([x[:, 1:], 0], 1)          x[:, 1:] has no equal chunks: it stays whole, and what it is joined to is cut

Weights of such an op have partial gradients as all others: a rank's come from the results of its own tokens.
"""

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import fx

from passes.errors import PlanError
from passes.partition.sequence.facts import Types, Undivided, no_sequence, no_typing, not_divisible, reads_whole
from passes.partition.sequence.flow import InnerSequences, begins, carried, sequence_flow
from passes.partition.sequence.rules import options_over_cp
from passes.partition.sequence.sorted_rows import Sorted, SortedRows
from passes.partition.typings.base import Form, Option, Site
from passes.program.ops.aten import shape_of, tensors_of, value_bytes
from passes.program.ops.groups import PRODUCTS, VIEWS
from passes.program.program import Program
from passes.program.walks import operands, walk
from passes.program.weights import is_weight
from passes.rules.flops import has_flops
from passes.types.types import I, P, Placement, R, V

SUM_CALL, SCALE_CALL, CUT_CALL = 1.0, 1e-2, 1e-3  # ranks typings that move equally many bytes


def decide_types(program: Program, cp: int, known: Sorted) -> Types:
    """``known``: the calls that sort rows by expert. Raises PlanError for a sequence that does not divide by 2·cp, for
    products that mix its tokens, and if there is none.

    Sequences that no input has are cut too, unless the program cannot be typed with them.
    """
    inner, results, error = InnerSequences(program, 2 * cp), [program.node(program.loss)], None
    for finder in (inner, None):
        types = Types(cp, 2 * cp)
        try:
            types_of(program, types, known, results, finder)
            _check_found(types, inner)
            return types
        except PlanError as found:
            is_last = not types.undivided or isinstance(found, Undivided)
            error = error or (found if is_last else not_divisible(*types.undivided[0], cp))
        if not types.begun:
            break
    raise error


def _check_found(types: Types, inner: InnerSequences) -> None:
    """Check that there is a sequence, and that those that do not divide are short beside one that does."""
    for node, size in types.undivided:
        if 2 * size > max(types.lengths, default=0):
            raise not_divisible(node, size, types.cp)
    if not types.natives:
        if inner.undivided is not None:
            raise not_divisible(*inner.undivided, types.cp)
        raise types.not_begun or no_sequence(types.cp)


def types_of(
    program: Program, types: Types, known: Sorted, results: Iterable[fx.Node], inner: InnerSequences | None = None
) -> Types:
    """Fill ``types`` with those of all values that ``results`` are made of. Raises PlanError as ``decide_types``.

    ``inner``: finds the sequences that no input has.
    """
    rows = SortedRows(known, types.chunks, types.natives)
    flow = sequence_flow(program)
    needed = set(walk(results, operands))
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node not in needed:
            continue
        if any(n in types.natives or n in types.options for n in node.all_input_nodes):
            _settle(node, types, rows.option(node) or _chosen(node, types))
        elif begins(node) and (cuts := {n: flow[n] for n in node.all_input_nodes if flow.get(n)}):
            _begin(node, types, cuts)
        elif inner is not None and begins(node) and (cuts := inner.cuts(node)):
            types.begun.append(node)
            _begin(node, types, cuts)
    return types


def _begin(node: fx.Node, types: Types, given: dict[fx.Node, set[Placement]]) -> None:
    """Without an option every rank computes all of an op. A product with a gradient, which mixes tokens, is refused."""
    cuts = {n: given.get(n, set()) for n in node.all_input_nodes}
    site = Site(node, types.chunks, {n.name: c for n, c in cuts.items()})
    for option in options_over_cp(site):
        pairs = list(zip(site.inputs, option.args, strict=True))
        if option.out.is_sharded and all(not t.is_sharded or t in cuts[n] for n, t in pairs):
            sizes = {size for _, t in pairs if t.is_sharded for size in t.sizes}
            if all(size % types.chunks == 0 for size in sizes):
                types.lengths |= sizes
                _settle(node, types, option)
            else:
                size = next(size for size in sizes if size % types.chunks)
                if not types.cuts_again:
                    raise not_divisible(node, size, types.cp)
                types.undivided.append((node, size))  # every rank computes it in full
            return
    if node.meta.get("grad"):
        error = reads_whole(node, next(iter(given)))
        if node.target in PRODUCTS or not types.cuts_again:
            raise error
        types.not_begun = types.not_begun or error


def _settle(node: fx.Node, types: Types, option: Option) -> None:
    types.options[node] = option
    if option.out.is_sharded or option.out == P:
        types.natives[node] = option.out
    elif not node.meta.get("grad") or option.form is not Form.WHOLE:  # rows that every rank holds, of more
        return
    else:
        # partial sums over tokens, read in full, are smaller than they are: a pooled sequence, not a mixed one
        for value in (n for n in node.all_input_nodes if types.of(n) == P):
            for op, source in _summed(value, types):
                if 2 * prod(shape_of(op)) > prod(shape_of(source)):
                    raise reads_whole(op, source)
        settle_whole(node, types)
        # a product of a weight takes the rows that a sequence was taken from: others are no tokens
        is_of_weight = node.target in PRODUCTS and any(map(is_weight, node.all_input_nodes))
        if types.begun and node in types.recut and is_of_weight:
            raise reads_whole(node, node.all_input_nodes[0])


def _summed(value: fx.Node, types: Types) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the ops that partial sums come of, each with the largest cut value that it sums over."""
    for node in walk([value], operands, into=lambda n: types.of(n) == P):
        cut = [n for n in node.all_input_nodes if types.of(n).is_sharded]
        if cut:
            yield node, max(cut, key=lambda n: prod(shape_of(n)))


def _chosen(node: fx.Node, types: Types) -> Option:
    """Return the typing that moves least; of those the first with a sharded result."""
    natives = {n.name: {types.natives[n]} for n in node.all_input_nodes if types.of(n).is_sharded}
    site = Site(node, types.chunks, natives)
    found: list[tuple[float, int, Option]] = []
    for option in options_over_cp(site):
        costs = [_cost(node, n, types, t) for n, t in zip(site.inputs, option.args, strict=True)]
        given = [c for c in costs if c is not None]
        is_here = types.cuts_again or not option.out.has_whole_segment
        # nothing is cut, or made partial, that was not before: it would only be work for two ranks
        kept = [t.kind in "VP" and types.of(n) == t for n, t in zip(site.inputs, option.args, strict=True)]
        if len(given) == len(costs) and is_here and (option.form is Form.WHOLE or any(kept)):
            found.append((sum(given), {"V": 0, "P": 1}.get(option.out.kind, 2), option))
    if not found:
        raise no_typing(node)
    return min(found, key=lambda item: item[:2])[2]


def _cost(reader: fx.Node, value: fx.Node, types: Types, wanted: Placement) -> float | None:
    """Return the bytes that a rank receives if a value is read in a type; None if it cannot be."""
    have = types.of(value)
    if wanted == I and value.meta.get("grad") and reader.meta.get("grad"):
        return None  # gradients of replicated values are partial
    if wanted.kind in "IR":
        whole = 0.0 if have == R or value in types.recut else float(value_bytes(gathered_from(value, types)))
        return whole + (SUM_CALL if have == P else 0.0)
    if have == R:
        return CUT_CALL if wanted.is_sharded else SCALE_CALL if next(tensors_of(value)).is_floating_point() else None
    return 0.0 if have == wanted else None


def gathered_from(value: fx.Node, types: Types) -> fx.Node:
    """Return the value to gather if a sharded value is read in full: the one before its heads were repeated."""
    node, best = value, value
    while node.target in VIEWS and types.of(node.all_input_nodes[0]).is_sharded:
        node = node.all_input_nodes[0]
        if value_bytes(node) < value_bytes(best):
            best = node
    return best


# ---- ops that read whole sequences and make as much of them


def settle_whole(node: fx.Node, types: Types) -> None:
    """A result that every rank computes of all tokens: small, cut again, or whole. Products of what cannot be cut are
    noted: of a few rows, as the states between the chunks of a scan, every rank may compute them.
    """
    # operands as large as a sequence, each with the dim where it has its tokens, or had them
    places = {n: types.of(n).dim for n in node.all_input_nodes if types.of(n).is_sharded}
    places |= {n: types.whole[n] for n in node.all_input_nodes if n in types.whole}
    largest = max(places, key=lambda n: prod(shape_of(n)), default=None)
    if largest is None or 2 * prod(shape_of(node)) <= prod(shape_of(largest)):
        return  # a pooled sequence
    if not types.cuts_again:
        raise reads_whole(node, largest)
    size, place = shape_of(largest)[places[largest]], _place(node, largest, places[largest])
    is_one = isinstance(node.meta["val"], torch.Tensor)
    cut = _cut_again(node, largest, place, types) if is_one else None
    if cut is not None:
        types.natives[node] = cut
        types.recut.add(node)
        types.lengths |= set(cut.sizes) if size in types.lengths else set()  # chunks of tokens are no tokens
    else:
        types.whole[node] = place
        if has_flops(node) and (largest in types.whole or types.of(largest).has_whole_segment):
            types.undivided.append((node, size))


def _place(node: fx.Node, read: fx.Node, place: int) -> int:
    """Return the dim of the result's tokens, by an operand's: where a rule carries it, or the same one."""
    cuts = carried(node, {read: {V(place, shape_of(read)[place])}})
    return min((cut.dim for cut in cuts), default=min(place, len(shape_of(node)) - 1))


def _cut_again(node: fx.Node, read: fx.Node, place: int, types: Types) -> Placement | None:
    """Cut as ``read`` is, if the result has its tokens where they were; else in equal chunks, if there are any."""
    size, before = shape_of(node)[place], types.of(read)
    is_same = before.is_sharded and (before.dim, shape_of(read)[before.dim]) == (place, size)
    if is_same and not (before.has_whole_segment and has_flops(node)):
        return before
    return V(place, size) if size > 1 and size % types.chunks == 0 else None
