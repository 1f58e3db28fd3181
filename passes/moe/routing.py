"""Facts of the values that a model makes of its router's choices: shown by computing them for random choices.

A model may sort, count and mask in any way; only the results matter: that rows are sorted by expert, the ends of each
expert's rows, and the tokens that an expert's gate lets through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from passes.moe import exchange
from passes.moe.ties import is_float
from passes.program.known_values import is_made_of
from passes.program.ops.aten import named, shape_of, tensors_of
from passes.program.ops.groups import BEST, CUTS, FILLED, RESHAPES, SORTS
from passes.program.walks import in_order, operands, walk
from passes.rules.flops import node_flops

TRIALS = 3
MOST = 1 << 26  # elements of a value that is worth a trial
FLOPS = 1 << 34  # of a trial for figures only


class Routing:
    """Choices ``chosen`` of ``size`` experts, each of all tokens; ``per_token``: of all of them together, 0 if experts
    take tokens. Owns: the random ones that were tried, and which of the values that were asked for depend on the
    choices."""

    def __init__(self, size: int, chosen: list[fx.Node], per_token: int) -> None:
        self.size, self.chosen, self.per_token = size, chosen, per_token
        self._asked, self._dependent = set[fx.Node](), set(chosen)
        self.num_rows = sum(n.meta["val"].numel() for n in chosen)

    def name_of(self, node: fx.Node, order: fx.Node | None = None) -> str:
        """Return what ``node`` is of the rows by expert: a name in ``opening.Exchange``, or "".

        ``order``: that of the rows; without it any order that sorts them is one.
        """
        left = ["order", "token", "places", "expert", "counts", "ends"]

        def holds(found: list[Tensor], counts: Tensor, ids: list[Tensor]) -> bool:
            value, given, flat = found[0].long(), found[-1].long(), torch.cat([x.reshape(-1) for x in ids])
            known = {"expert": flat.sort().values, "counts": counts, "ends": counts.cumsum(0)}
            is_order = torch.equal(given.sort().values, torch.arange(len(flat)))
            if is_order and torch.equal(flat[given], known["expert"]):
                known |= {"order": given, "token": given // self.top_k, "places": torch.argsort(given)}
            left[:] = [name for name in left if name in known and torch.equal(value, known[name])]
            return bool(left)

        return left[0] if self.holds([node] if order is None else [node, order], holds) else ""

    def lets_through(self, nodes: Sequence[fx.Node], tokens: int, experts: range) -> bool:
        """Return whether a value [tokens.., experts, rest..], or one [tokens.., rest..] of each, is exactly zero, or
        False, and gives no gradient, for all tokens that did not choose the expert."""
        each = len(experts) // len(nodes)

        def only(found: list[Tensor], _: Tensor, ids: list[Tensor]) -> bool:
            if len({value.numel() for value in found}) > 1 or found[0].numel() % (tokens * each):
                return False
            of_pairs = torch.cat([value.reshape(tokens, each, -1) for value in found], 1)
            chose = torch.cat([x.reshape(tokens, -1) for x in ids], 1)
            return _is_nothing(of_pairs, ~torch.stack([chose.eq(e).any(1) for e in experts], 1))

        return self.holds([*nodes], only)

    def groups_filled(self, node: fx.Node, slots: int) -> int:
        """Return the number of groups of tokens for which a value of experts and ``slots`` fills, for each expert, as
        many slots as tokens of the group chose it, up to all, even if all chose one; 0 if that does not hold."""
        made = [n for n in self._order([node])[0] if n.op == "call_function"]
        if any(t.numel() > MOST for n in made for t in tensors_of(n)) or sum(map(node_flops, made)) > FLOPS:
            return 0
        left = list(_fillings(shape_of(node), self.size, slots, self.num_rows if len(self.chosen) == 1 else 1))

        def is_full(found: Tensor, ids: list[Tensor], groups: int, dims: tuple[int, ...]) -> bool:
            rest = [d for d in range(found.dim()) if d not in dims]
            filled = found.ne(0).permute(*dims, *rest).reshape(groups, self.size, slots, -1).any(3).sum(2)
            return torch.equal(filled, exchange.count_by_group(self.size, groups, *ids).clamp(max=slots))

        def full(found: list[Tensor], _: Tensor, ids: list[Tensor]) -> bool:
            left[:] = [filling for filling in left if is_full(found[0], ids, *filling)]
            return bool(left)

        return left[0][0] if self.holds([node], full, [*self._trials, *self._skewed]) else 0

    def are_choices(self, node: fx.Node) -> bool:
        """Return whether it is the choices themselves, token by token, each repeated along the dims after it."""

        def only(found: list[Tensor], _: Tensor, ids: list[Tensor]) -> bool:
            chosen = ids[0].reshape(-1, 1)
            is_whole = found[0].numel() % len(chosen) == 0
            return is_whole and bool((found[0].reshape(len(chosen), -1) == chosen).all())

        return len(self.chosen) == 1 and self.holds([node], only)

    @property
    def num_tokens(self) -> int:
        return self.num_rows // self.per_token

    @property
    def top_k(self) -> int:
        """How many a token has, of the one that chooses."""
        return self.chosen[0].meta["val"].numel() // self.num_tokens

    @cached_property
    def are_scored(self) -> bool:
        """Whether scores decide; other choices may be of one expert twice, as a table of tokens says."""
        return any(map(is_float, walk(self.chosen, operands, stop=is_float)))

    @cached_property
    def are_distinct(self) -> bool:
        """Whether no token can have an expert twice: one call chooses, or ranks experts of which the first are chosen,
        along the last dim."""
        call = self.chosen[0]
        while call.target is getitem or call.target in CUTS:
            call = call.all_input_nodes[0]
        if len(self.chosen) != 1 or call.target not in BEST | SORTS:
            return False
        shape = shape_of(call.all_input_nodes[0])
        return shape[-1] == self.size and int(named(call).get("dim", -1)) % len(shape) == len(shape) - 1

    def holds(
        self,
        nodes: list[fx.Node],
        fact: Callable[[list[Tensor], Tensor, list[Tensor]], bool],
        trials: list[list[Tensor]] | None = None,
    ) -> bool:
        """Return whether ``fact(values, counts, choices)`` holds of the values of ``nodes`` in every trial; all else
        that they are made of is random."""
        facts = (
            bool(values) and fact([values[n] for n in nodes], exchange.count_experts(self.size, *ids), ids)
            for values, ids in self.tried(nodes, trials)
        )
        return next(facts, False) and all(facts)

    def tried(
        self, nodes: Sequence[fx.Node], trials: list[list[Tensor]] | None = None
    ) -> Iterator[tuple[Mapping[fx.Node, Tensor], list[Tensor]]]:
        """Yield for each trial the values up to ``nodes``, none if an op failed, and the choices. No trial if one of
        ``nodes`` does not depend on the choices."""
        order, below = self._order(nodes)
        if any(node not in below for node in nodes):
            return
        for ids in self._trials if trials is None else trials:
            yield _computed(order, dict(zip(self.chosen, ids, strict=True)), below) or {}, ids

    def inputs(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the values that ``nodes`` are made of beside the choices, those that are random in a trial."""
        order, below = self._order(nodes)
        return [n for n in order if n not in self.chosen and not _is_computed(n, below)]

    def _order(self, nodes: Sequence[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
        """Return the nodes to compute for them, and all of those that depend on the choices."""
        first, below = min(self.chosen), self._dependent  # nodes of one graph are in its order: no walk beyond
        for node in in_order(
            nodes, step=lambda n: [x for x in n.all_input_nodes if x > first and x not in self._asked]
        ):
            self._asked.add(node)
            below |= {node} if any(x in below for x in node.all_input_nodes) else set()
        step = lambda n: n.all_input_nodes if _is_computed(n, below) else ()  # noqa: E731
        return in_order(nodes, given=self.chosen, step=step), below

    @cached_property
    def _trials(self) -> list[list[Tensor]]:
        shapes = tuple((shape_of(n), n.meta["val"].dtype) for n in self.chosen)
        return _choices(self.size, shapes, self.are_scored)

    @property
    def _skewed(self) -> list[list[Tensor]]:
        """Choices of which the first experts are all; and such that two tokens alone chose the last ones: neighbours,
        which compete wherever some do, and the first and the last of all."""
        first = [torch.arange(n.numel()).view_as(n) % self.top_k for n in self._trials[0]]
        pairs = [(torch.arange(n.numel()).view_as(n) // self.top_k, n) for n in first]
        beside = [torch.where(t < 2, self.size - 1 - n, n) for t, n in pairs]
        apart = [torch.where((t == 0) | (t == t.max()), self.size - 1 - n, n) for t, n in pairs]
        return [first, beside, apart]


@lru_cache(maxsize=4)  # layers of one model are alike
def _choices(size: int, chosen: tuple[tuple[tuple[int, ...], torch.dtype], ...], distinct: bool) -> list[list[Tensor]]:
    """Return choices in which a token has no expert twice, if they are ``distinct``; in the last trial, some experts
    have no token."""
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype, of: int) -> Tensor:
        if not distinct or not shape or shape[-1] > size:
            return torch.randint(of, shape, generator=generator, dtype=dtype)
        of = max(shape[-1], of)
        return torch.rand((*shape[:-1], of), generator=generator).argsort(-1)[..., : shape[-1]].to(dtype)

    return [[drawn(*kind, of) for kind in chosen] for of in (*[size] * (TRIALS - 1), max(size // 2, 1))]


def _is_computed(node: fx.Node, below: set[fx.Node]) -> bool:
    """Return whether a call is to be run: its value depends on the choices, is made of numbers alone, or is another in
    a shape of its own."""
    if node.op != "call_function":
        return False
    if node in below or not node.all_input_nodes or node.target in FILLED or node.target in RESHAPES:
        return True
    return not node.meta["grad"] and is_made_of(node, ())


def _fillings(shape: tuple[int, ...], size: int, slots: int, num_rows: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (number of groups of tokens, dims of a value that may count these, if several, then experts and slots)."""
    places = [(e, c) for e, n in enumerate(shape) for c, m in enumerate(shape) if e != c and (n, m) == (size, slots)]
    yield from ((1, place) for place in places)
    for place in places:
        groups = [(n, g) for g, n in enumerate(shape) if g not in place and n > 1 and num_rows % n == 0]
        yield from ((n, (g, *place)) for n, g in groups)


def _is_nothing(found: Tensor, where: Tensor) -> bool:
    """Return whether all is zero there, and whatever it is made of gets no gradient by it."""
    there = found[where]
    if bool(there.any()):
        return False
    leaves = list(leaves_of(there))
    if not leaves:
        return True
    grads = torch.autograd.grad((there * torch.rand_like(there)).sum(), leaves, allow_unused=True)
    return not any(g is not None and bool(g.any()) for g in grads)


def leaves_of(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of its autograd graph."""
    work, seen = [value.grad_fn], set[Any]()
    while work:
        function = work.pop()
        if function is not None and function not in seen:
            seen.add(function)
            work += [before for before, _ in function.next_functions]
            if isinstance(leaf := getattr(function, "variable", None), Tensor):
                yield leaf


def _computed(
    order: list[fx.Node], known: Mapping[fx.Node, Tensor], below: set[fx.Node]
) -> Mapping[fx.Node, Tensor] | None:
    values: dict[fx.Node, Any] = dict(known)
    for node in order:
        if _is_computed(node, below):
            target: Any = node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            try:
                values[node] = target(*args, **kwargs)
            except Exception:  # an op that fails for a random choice
                return None
        else:
            value = node.meta["val"]
            if not isinstance(value, Tensor) or not value.dtype.is_floating_point or value.numel() > MOST:
                return None
            values[node] = (torch.rand(shape_of(node), dtype=value.dtype) + 0.5).requires_grad_()
    return values
