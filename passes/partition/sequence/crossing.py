"""Does document 2 of a packed sequence depend on a token of document 1? Asked by op.

    linear, gelu, rotary …           row by row, by the rule table          rows stay with their documents
    q @ kᵀ, cumsum, conv, fft …      an op that mixes rows: a trial         moves some element with both documents?
    … · mask, softmax(… − inf)       the trial goes on                      until each element reads one document again
    a product with a weight          reads an element of both               the op that mixed them is the answer

A trial runs ops on numbers, three times (passes.partition.sequence.three_runs). Values pooled over tokens may read both
documents while they stay in the loss: means, balancing losses. Masks and integers made of positions, say, are computed.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, fx

from passes.moe.layers import Dispatch, ExpertLayer
from passes.partition.sequence.flow import of_input
from passes.partition.sequence.three_runs import (
    HeldValues,
    Pooled,
    Rows,
    Run,
    State,
    ThreeRuns,
    moved,
    pure_runs,
    spread,
)
from passes.program.ops.aten import shape_of, tensors_of
from passes.program.ops.groups import CHOICES, CONVOLUTIONS, PRODUCTS
from passes.program.program import Program
from passes.program.walks import ancestors, readers, walk
from passes.program.weights import is_parameter, is_weight
from passes.rules.rule import RESULT, Role, key_of, operands_of
from passes.rules.table import rule_of

NEARLY_ALL = 0.9  # of the elements that rows read; where a mask blanks more, their places may matter
DROPPING = {Dispatch.CAPACITY, Dispatch.TAKEN}  # a token takes the place of another


def crossing(
    program: Program,
    homes: Tensor,
    batch: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    experts: Collection[ExpertLayer] = (),
    *,
    repeats: bool = False,
) -> fx.Node | None:
    """Return the first op by which a value of one document of the loss reads the other; None if none does.

    ``homes`` [tokens]: the document of each token, 1 or 2, in every sequence. ``batch``: by placeholder, the inputs
    that are no tokens. ``tensors``: likewise of buffers. ``experts``: layers that compute tokens one by one.
    ``repeats``: whether an op counts, too, that gives equal documents other values, by their places.
    """
    return _Crossing(ThreeRuns(program, batch, tensors, repeats), homes, experts).first()


class _Crossing:
    """Owns the states of values, and the homes of a token's own rows by their number."""

    def __init__(self, runs: ThreeRuns, homes: Tensor, experts: Collection[ExpertLayer]) -> None:
        self.runs, self.states, self.tokens = runs, runs.states, len(homes)
        self.homes = {len(homes): homes}
        self.tried: dict[object, Rows | None] = {}
        self.sizes = {len(homes)}
        plain, node = [layer for layer in experts if layer.dispatch not in DROPPING], runs.program.node
        self.layers = {node(layer.combined): node(layer.tokens) for layer in plain}
        self.inside = {n for layer in plain for n in _inside(runs.program, layer)}
        nodes = runs.program.graph.graph.nodes
        self.unread = {n: len(n.users) for n in nodes}  # readers that are not known yet
        self.above = ancestors(filter(self._counts_tokens, nodes)) if runs.repeats else set[fx.Node]()

    def first(self) -> fx.Node | None:
        program = self.runs.program
        needed = ancestors([program.node(program.loss)])
        for node in program.graph.graph.nodes:
            if node.name in program.inputs and node.name not in self.runs.batch:
                cut = next(iter(of_input(node)), None)
                if cut is not None and cut.sizes == (self.tokens,):
                    self.states[node] = Rows((1, 1, self.tokens), self.homes[self.tokens])
            elif node.op == "call_function" and node in needed and (origin := self._asked(node)) is not None:
                return origin
            for n in node.all_input_nodes:
                self.unread[n] -= 1
                if not self.unread[n] and isinstance(state := self.states.get(n), HeldValues):
                    self.states[n] = Pooled(state.origin)  # its values take memory
        return None

    def _asked(self, node: fx.Node) -> fx.Node | None:
        """Return the op that mixes documents, if that is certain now, or nothing can show that none does."""
        given = {n: self.states[n] for n in node.all_input_nodes if n in self.states}
        try:
            return self._settle(node) if given else None
        except Exception:  # too large, or whatever an op raises on numbers
            rows = {n: s.rows for n, s in given.items() if isinstance(s, HeldValues) and s.rows is not None}
            self.states.update(rows)
            return self._asked(node) if rows else self._origin(node)

    def _settle(self, node: fx.Node) -> fx.Node | None:
        """Note the state of a result; returns the op that mixed documents if it is now certain."""
        given = [self.states[n] for n in node.all_input_nodes if n in self.states]
        mixed = next((s.origin for s in given if isinstance(s, HeldValues) and s.is_mixed and not s.is_mean), None)
        rule, read = rule_of(node), [i for i, n in enumerate(operands_of(node)) if n in self.states]
        reads_shapes = rule is not None and bool(read) and all(i in rule.unread for i in read)  # as of zeros_like
        if next(tensors_of(node), None) is None or reads_shapes:
            return None
        if node in self.inside:
            return self._note(node, Pooled(node))
        if (rows := self._of_experts(node)) is not None:
            return self._note(node, rows)
        if all(x.numel() == 1 for x in tensors_of(node)):
            return mixed or self._note(node, Pooled(self._origin(node)))
        if all(isinstance(s, Pooled) for s in given) and not self._has_tokens(node):
            return self._note(node, Pooled(self._origin(node)))
        if all(isinstance(s, Rows) for s in given) and (state := self._by_rule(node)) is not None:
            return self._note(node, state)
        return self._try(node, mixed)

    def _of_experts(self, node: fx.Node) -> State | None:
        """Return the rows of a layer's result, if it computes tokens one by one: those of the tokens that it reads."""
        tokens = self.layers.get(node)
        rows = None if tokens is None else self.states.get(tokens)
        if tokens is None or not isinstance(rows, Rows):
            return None
        run = _reshaped(rows.run, shape_of(tokens), shape_of(node))
        return None if run is None else replace(rows, run=run)

    def _note(self, node: fx.Node, state: State | None) -> None:
        if state is not None:
            self.states[node] = state
        if isinstance(state, Rows):
            self.sizes.add(shape_of(node)[state.run[0]])
            self.homes.setdefault(state.run[2], state.homes)

    # ---- by the rule table

    def _by_rule(self, node: fx.Node) -> State | None:
        """Return rows of rows, or their sum; None if that takes a trial."""
        rule, found = rule_of(node), list[tuple[Run | None, Rows]]()
        for position, operand in enumerate(operands_of(node)):
            state = self.states.get(operand)
            if rule is None or not isinstance(state, Rows) or position in rule.unread:
                continue
            dim, inner, size = state.run
            roles = {factor.role for factor in rule.along(position, dim)}
            to = rule.carried(position, dim, inner, size, RESULT)
            if Role.MIX in roles or (to is None and roles != {Role.SUM}):
                return None
            found.append((None if to is None else (*to, size), state))
        runs = {run for run, _ in found}
        homes = _joined([state.homes for _, state in found])
        if len(runs) != 1 or homes is None or self._may_mask(node, [s for _, s in found], None in runs):
            return None
        run = runs.pop()
        if run is None:
            return Pooled(node)
        origin = next((s.origin for _, s in found if s.origin is not None), None)
        return Rows(run, homes, None if self._is_at_home(run[2], homes) else origin)

    def _may_mask(self, node: fx.Node, rows: list[Rows], is_sum: bool) -> bool:
        """Return whether an operand that no token reaches could blank rows that are not at home, or a part of a sum."""
        others = [n for n in node.all_input_nodes if n not in self.states]
        made = [n for other in others for n in (ancestors([other]) if is_weight(other) else ())]
        # a weight that known values change may be a mask
        is_told = not all(map(is_weight, others)) or not all(n.all_input_nodes or is_parameter(n) for n in made)
        is_chosen = self.runs.repeats and node.target in CHOICES  # by masks of documents, before a sum
        return is_told and (is_sum or is_chosen or not all(self._is_at_home(s.run[2], s.homes) for s in rows))

    def _is_at_home(self, size: int, homes: Tensor) -> bool:
        """Return whether rows read their own tokens, or none. Of a number that is new, they say which are their own."""
        own = self.homes.get(size, homes)
        return bool(((homes == own) | (homes == 0)).all())

    # ---- by trial

    def _try(self, node: fx.Node, mixed: fx.Node | None) -> fx.Node | None:
        key = self._key(node)
        if key in self.tried:
            return self._note(node, self.tried[key])
        values = self.runs.called(node)
        state = self._state(node, values)
        if isinstance(state, Pooled) and mixed is not None:
            return mixed
        if isinstance(state, Rows) and self.runs.repeats:
            is_whole = state.run[2] == self.tokens  # parts of chunks depend on where they begin, until they are added
            if not is_whole or not self.runs.starts_alone(values, state):
                state = HeldValues(self._origin(node), values, None if is_whole else state, is_mixed=is_whole)
        if key is not None and (state is None or (isinstance(state, Rows) and state.origin is None)):
            self.tried[key] = state
        if state is None:
            self.runs.known[node] = values[0]
        return self._note(node, state)

    def _key(self, node: fx.Node) -> object:
        """Return a key that is equal for calls on rows at home that need one trial; None for others."""
        states = {n: self.states.get(n) for n in node.all_input_nodes}
        told = [n for n, s in states.items() if s is None]
        rows = [s for s in states.values() if isinstance(s, Rows) and s.origin is None]
        alike = key_of(node) if len(told) + len(rows) == len(states) else None
        return None if alike is None else (alike, *told, *(s.run for s in rows))

    def _state(self, node: fx.Node, values: tuple[object, object, object]) -> State | None:
        """Return the state by the elements that other tokens of each document move."""
        pairs = list(zip(moved(values[0], values[1]), moved(values[0], values[2]), strict=True))
        if not any(one.any() or two.any() for one, two in pairs):
            return None
        origin, is_mixed = self._origin(node), any(bool((one & two).any()) for one, two in pairs)
        if is_mixed and not self._has_tokens(node):
            return Pooled(origin)
        runs = list(pure_runs(*pairs[0], self.tokens)) if len(pairs) == 1 and not is_mixed else []
        rows = None
        if len(runs) == 1:
            ((run, homes),) = runs
            rows = Rows(run, homes, None if self._is_at_home(run[2], homes) else origin)
            read = (spread(homes, run, shape_of(node)) > 0).expand(shape_of(node))
            if (pairs[0][0] | pairs[0][1])[read].float().mean() > NEARLY_ALL:
                return rows
        return HeldValues(origin, values, rows, is_mixed, is_mixed and self._is_mean(node))

    def _is_mean(self, node: fx.Node) -> bool:
        given = [self.states[n] for n in node.all_input_nodes if n in self.states]
        of_means = any(isinstance(s, Pooled) or (isinstance(s, HeldValues) and s.is_mean) for s in given)
        is_product = node.target in PRODUCTS or node.target in CONVOLUTIONS
        return of_means and not (is_product and any(map(is_weight, node.all_input_nodes)))

    def _has_tokens(self, node: fx.Node) -> bool:
        """Return whether some dim is as long as rows of tokens are, or, if documents repeat, that of a value made of
        it: sums of chunks are no means."""
        return node in self.above or self._counts_tokens(node)

    def _counts_tokens(self, node: fx.Node) -> bool:
        return any(n in self.sizes for x in tensors_of(node) for n in map(int, x.shape))

    def _origin(self, node: fx.Node) -> fx.Node:
        """Return the op that first took values from their tokens, on the way here."""
        given = [self.states[n].origin for n in node.all_input_nodes if n in self.states]
        return next((origin for origin in given if origin is not None), node)


def _joined(homes: list[Tensor]) -> Tensor | None:
    """Return the documents that rows of several values read together; None if some row reads both."""
    found = homes[0] if homes else None
    for other in homes[1:]:
        if other.shape != found.shape or ((found != other) & (found > 0) & (other > 0)).any():  # pyright: ignore
            return None
        found = torch.maximum(found, other)  # pyright: ignore
    return found


def _reshaped(run: Run, shape: tuple[int, ...], to: tuple[int, ...]) -> Run | None:
    """Return the same tokens in a reshaped value; None if no one dim counts them."""
    dim, inner, size = run
    distance = inner * prod(shape[dim + 1 :])
    for other, length in enumerate(to):
        step, rest = divmod(distance, prod(to[other + 1 :]))
        if not rest and step and step * size <= length and prod(shape) == prod(to):
            return other, step, size
    return None


def _inside(program: Program, layer: ExpertLayer) -> set[fx.Node]:
    """Return the calls between the choices of a layer and its result."""
    combined, chosen = program.node(layer.combined), {program.node(name) for name in layer.chosen}
    above = ancestors([combined])
    return set(walk(chosen, readers, into=lambda n: n in above)) - chosen - {combined}
