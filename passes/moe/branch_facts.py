"""Facts of the branches of a layer of experts: how their results end, and inputs that need no stack over the experts.

    end = base + Σ_e tip_e                          in any order; an overwritten row is where(mask_e, 0, before) + tip_e
    end = cat([tip_0, tip_1, …]).gather(ids)        for each token the results of its choices

Inputs that are known at the tokens that chose an expert are found by trials of values and gradients, so a model may
write them in any way:

    where(chosen == e, w, 0).sum(-1)                w of the pair of token and choice, a value [tokens, choices]
    (chosen == e).any(-1)                           True: where(it, y, 0) is y
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, fx

from passes.moe.layers import Refusal
from passes.moe.routing import Routing, leaves_of
from passes.program.ops.aten import aten, dim_of_cat, packet_of, reduced_dims, shape_of, without_reshapes
from passes.program.ops.groups import JOINS, LAID_OUT
from passes.program.walks import meetings, readers, walk

MOST = 4096  # calls between the first tip and the end, and as many for each


def end_of(tips: list[fx.Node], routing: Routing, refusal: Refusal) -> End:
    """Return the ``End`` of branches. Raises the error of ``refusal`` if the tips are combined otherwise."""
    meeting = next(meetings(tips, most=MOST * len(tips)))  # the layer was found by one
    if meeting.target in JOINS and len(meeting.users) == 1:
        (user,) = meeting.users
        if packet_of(user.target) is aten.gather and user.args[0] is meeting:
            _check_pick(tips, meeting, user, routing, refusal)
            return End(user, picks=True)
        meeting = user
    end = End(meeting)
    end.find_summands(set(tips), refusal)
    return end


def _check_pick(tips: list[fx.Node], joined: fx.Node, pick: fx.Node, routing: Routing, refusal: Refusal) -> None:
    """Check that ``pick`` takes the parts of each token's choices, of parts in the order of the experts."""
    dim = dim_of_cat(joined)
    ids, along = pick.args[2], int(pick.args[1]) % len(shape_of(joined))  # pyright: ignore
    is_in_order = list(joined.args[0]) == tips and {shape_of(n)[dim] for n in tips} == {1}  # pyright: ignore
    if not is_in_order or along != dim or not isinstance(ids, fx.Node):
        raise refusal(pick, "their results are not concatenated in order and then indexed")
    same_rest = shape_of(ids)[dim + 1 :] == shape_of(joined)[dim + 1 :]
    if prod(shape_of(ids)[:dim]) != routing.num_tokens or not same_rest or not routing.are_choices(ids):
        raise refusal(pick, "the indexing does not follow the choice of each token")


@dataclass
class End:
    """The combined value ``node`` of all branches. ``picks``: whether they are picked by ids, and not added up.
    ``bases``: further summands. ``hidden``: the masks under which a summand is overwritten with zero."""

    node: fx.Node
    picks: bool = False
    bases: list[fx.Node] = field(default_factory=list)
    hidden: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def find_summands(self, tips: set[fx.Node], refusal: Refusal) -> None:
        """Walk up from the sum to ``tips`` and other summands."""
        of_tips = set(walk(tips, readers, into=lambda n: n <= self.node))
        work: list[tuple[fx.Node, list[fx.Node]]] = [(self.node, [])]
        while work:
            node, masks = work.pop()
            if node in tips:
                if node in self.hidden:
                    raise refusal(node, "the result of one is added twice")
                self.hidden[node] = masks
            elif node in of_tips or (masks and _overwrites(node)):
                work += _parts(node, masks, refusal)
            elif not is_zero(node):
                if shape_of(node) != shape_of(self.node):
                    raise refusal(node, "another value in the sum has a different shape")
                self.bases.append(node)
                self.hidden[node] = masks
        if tips - self.hidden.keys():
            raise refusal(self.node, "their results are not summed directly")


def _parts(node: fx.Node, masks: list[fx.Node], refusal: Refusal) -> list[tuple[fx.Node, list[fx.Node]]]:
    packet, same = packet_of(node.target), {n.meta["val"].dtype for n in node.all_input_nodes}
    if packet is aten.add and not node.kwargs and all(isinstance(a, fx.Node) or a == 0 for a in node.args):
        return [(a, masks) for a in node.args if isinstance(a, fx.Node)]
    if packet in (aten.reshape, aten.to) and same == {node.meta["val"].dtype}:
        return [(node.all_input_nodes[0], masks)]
    if _overwrites(node):
        return [(node.args[2], [*masks, node.args[0]])]  # pyright: ignore
    if packet is aten.sum and node.all_input_nodes[0].target in JOINS:
        joined = node.all_input_nodes[0]
        dim = dim_of_cat(joined)
        if reduced_dims(node) == {dim} and {shape_of(n)[dim] for n in joined.all_input_nodes} == {1}:
            return [(n, masks) for n in joined.args[0]]  # pyright: ignore
    raise refusal(node, "their results are not summed directly")


def _overwrites(node: fx.Node) -> bool:
    """Return whether a call is where(mask, 0, before)."""
    return packet_of(node.target) is aten.where and is_zero(node.args[1]) and isinstance(node.args[2], fx.Node)


def check_hidden(end: End, gates: Mapping[fx.Node, fx.Node], tokens: int, routing: Routing, refusal: Refusal) -> None:
    """Check that overwriting changes nothing: an overwritten part of a tip was zero, by its gate; another overwritten
    value is overwritten entirely, and is then no summand.
    """
    masked = {n: masks for n, masks in end.hidden.items() if masks}
    if not masked:
        return
    nodes = list(dict.fromkeys([*gates.values(), *(m for masks in masked.values() for m in masks)]))
    covered = [n for n in masked if n in end.bases]

    def holds(found: list[Tensor], _: Tensor, __: list[Tensor]) -> bool:
        if any(value.numel() != tokens for value in found):
            return False
        seen = {n: value.reshape(tokens) != 0 for n, value in zip(nodes, found, strict=True)}
        of_tips = [(gates[n], m) for n, masks in masked.items() if n not in end.bases for m in masks]
        is_covered = (bool(torch.stack([seen[m] for m in masked[n]]).any(0).all()) for n in covered)
        return not any(bool((seen[gate] & seen[m]).any()) for gate, m in of_tips) and all(is_covered)

    if not routing.holds(nodes, holds):
        raise refusal(end.node, "the result of one is overwritten by that of another")
    end.bases = [n for n in end.bases if n not in covered]


def is_zero(value: object) -> bool:
    """Return whether ``value`` is a zero, or a tensor of zeros."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    packet = packet_of(value.target)
    if packet in (aten.zeros, aten.zeros_like, aten.new_zeros):
        return True
    if packet in (aten.full, aten.full_like, aten.new_full, aten.scalar_tensor):
        return is_zero(value.args[0 if packet is aten.scalar_tensor else 1])
    return value.target in LAID_OUT and is_zero(value.all_input_nodes[0])


# ---- inputs that are known where a token chose the expert


def weight_of(routing: Routing, num_tokens: int, column: Sequence[fx.Node]) -> fx.Node | None:
    """Return the value of each choice that an input of each branch is at its tokens; None if it is none."""
    first = column[0].meta["val"]
    if first.numel() != num_tokens or not first.dtype.is_floating_point:
        return None
    form = (routing.num_rows, first.dtype)
    outside = [n for n in routing.inputs(column) if (n.meta["val"].numel(), n.meta["val"].dtype) == form]
    for values, ids in routing.tried(column):
        rows = _rows(num_tokens, column, values, ids)
        outside = [n for n in outside if rows is not None and _is_of(rows, values[n])]
    return outside[0] if outside else None


def is_true(routing: Routing, num_tokens: int, column: Sequence[fx.Node]) -> bool:
    """Return whether an input of each branch is True at all tokens that chose its expert."""
    if column[0].meta["val"].dtype is not torch.bool:
        return False
    found = [_rows(num_tokens, column, values, ids) for values, ids in routing.tried(column)]
    return bool(found) and all(rows is not None and bool(rows.all()) for rows in found)


def _rows(
    num_tokens: int, column: Sequence[fx.Node], values: Mapping[fx.Node, Tensor], ids: list[Tensor]
) -> Tensor | None:
    """Return the input of each pair of a token and an expert that it chose, in the order of the pairs [pairs, rest];
    None if a branch reads another value."""
    if any(n not in values or shape_of(n) != shape_of(column[0]) for n in column):
        return None
    expert = ids[0].flatten().long()
    token = torch.arange(len(expert)) // (len(expert) // num_tokens)
    return torch.stack([values[n].reshape(num_tokens, -1) for n in column])[expert, token]


def _is_of(rows: Tensor, weight: Tensor) -> bool:
    """Return whether rows [pairs, 1] are a weight's elements, and so are their gradients; no other value gets one."""
    if not torch.equal(rows.flatten(), weight.flatten()):
        return False
    drawn, leaves = torch.rand_like(rows), list(leaves_of(rows))
    grads = torch.autograd.grad((rows * drawn).sum(), leaves, allow_unused=True)
    wanted = [drawn.view_as(leaf) if leaf is weight else torch.zeros_like(leaf) for leaf in leaves]
    return all(torch.equal(w if g is None else g, w) for g, w in zip(grads, wanted, strict=True))


def hides_nothing(node: fx.Node, true: fx.Node) -> fx.Node | None:
    """Return the value that a call gives where ``true`` is True, if the call only chooses by it."""
    if packet_of(node.target) is not aten.where or len(node.args) < 2 or node.args[0] is not true:
        return None
    kept, whole = node.args[1], shape_of(node)
    mask = (1,) * (len(whole) - len(shape_of(true))) + shape_of(true)
    by_row = any(mask == whole[:d] + (1,) * (len(whole) - d) for d in range(1, len(whole) + 1))
    if not isinstance(kept, fx.Node) or shape_of(kept) != whole or not by_row:
        return None
    return kept if kept.meta["val"].dtype == node.meta["val"].dtype else None


def bared(routing: Routing, num_tokens: int, column: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """Return the values under masks that are True at all rows of an expert: float16 hides other rows at each read."""
    covers = [without_reshapes(node) for node in column]
    masks = [n.args[0] for n in covers if packet_of(n.target) is aten.where and isinstance(n.args[0], fx.Node)]
    found = [n for pair in zip(covers, masks, strict=False) if (n := hides_nothing(*pair)) is not None]
    if len(found) < len(column) or not is_true(routing, num_tokens, masks):
        return column
    return bared(routing, num_tokens, found)
