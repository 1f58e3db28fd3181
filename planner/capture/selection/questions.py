"""A forward's questions about data in Python: whether a mask selects any row, and checks that only raise.

    if mask.any(): …          if token.numel() == 0: continue          if expert_mask[e].sum() > 0: …
    if not (ids < n).all(): raise …                                    (planner.capture.selection.assumed)

All other questions are refused. Whether a mask selects any row may be answered either way, if the plan is the same: if
no row is selected, nothing is written. So the model is exported with other answers too, and each export must compute
what the first does without those writes.

How many rows a mask selects is asked in planner.capture.selection.full_masks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import BooleanFunction
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from passes.errors import Where
from passes.interceptors import installed
from passes.program.known_values import known_results
from passes.program.ops.aten import aten, is_mutable, packet_of
from passes.program.walks import operands, walk
from planner.capture.model.exchange import storage_of
from planner.capture.selection.assumed import Assumptions, Taken, key_of_stack
from planner.capture.selection.conditions import condition_of, is_read, reads_of
from planner.capture.selection.full_masks import FullMasks
from planner.capture.selection.space import Keys, is_count, key_of_mask, root_of
from planner.capture.selection.spelled_out import SpelledOut
from planner.capture.user_lines import CallSites

Answer = Callable[[int], bool]  # of the first, second … mask asked about: whether it selects no row
OTHER_ANSWERS: tuple[Answer, ...] = (lambda i: True, lambda i: i % 2 == 0)


class Questions:
    """Owns the answers given in one export, of masks by number. ``empty``: masks that were said to select no row.
    ``were_answered``: whether a branch asked for data, and got an answer.
    """

    def __init__(self, sites: CallSites, assumed: Assumptions, answer: Answer | None = None) -> None:
        self._sites, self._assumed, self._answer = sites, assumed, answer or (lambda i: False)
        self._is_first = answer is None
        self._full = FullMasks(assumed, sites.here)
        self.asked: list[Where] = []
        self.were_answered = False
        self.empty: set[int] = set()
        self._keys, self._numbers = Keys(), dict[str, int]()
        self._makers: dict[sympy.Symbol, fx.Node] = {}
        self._last: fx.Node | None = None
        self._answered: dict[Any, bool] = {}

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Answer branches on whether a mask selects any row, and let checks raise, inside."""
        self._assumed.begin()
        before: Any = ShapeEnv.evaluate_sym_node
        defer: Any = ShapeEnv.guard_or_defer_runtime_assert

        def evaluate(env: ShapeEnv, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return before(env, sym_node, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                answer = self._told(sym_node.expr)
                if answer is None:
                    raise
                self.were_answered = True
                return sympy.true if answer else sympy.false

        def deferred(env: ShapeEnv, question: Any, *args: Any, **kwargs: Any) -> Any:
            return self._check(question) or defer(env, question, *args, **kwargs)

        watched = (ShapeEnv, "evaluate_sym_node", evaluate), (ShapeEnv, "guard_or_defer_runtime_assert", deferred)
        selections = known_results(self._full.prepared), (FakeTensor, "tolist", self._full.asked(FakeTensor.tolist))
        with installed(*watched, *selections), SpelledOut(self._sites.refuse):
            yield

    def draw_is_not_zero(self) -> None:
        """Note that a branch asks whether a number drawn from [0, 1) is more than 0."""
        self._assumed.drew(self._sites.here())

    def _told(self, question: Any) -> bool | None:
        """Return the answer to a question about numbers of rows or truth values; None for other questions."""
        tracer, makers = self._makers_of(question)
        if not makers:
            return _told_inside(question)
        again = self._identity(question, makers)
        if again in self._answered:
            return self._answered[again]
        if (answer := self._of_equal_masks(question, list(makers.values()))) is not None:
            return answer
        key = key_of_stack()
        answer = self._assumed.answer(key)
        if answer is None:
            answer = self._of_mask(question, makers)
        if answer is None and all(is_read(node) for node in makers.values()):
            answer = self._assumed.guess(key)
        if answer is not None:
            is_assumed = self._assumed.answer(key) is not None
            condition = condition_of(question, answer, makers, tracer) if is_assumed else None
            self._assumed.took(Taken(key, answer, self._sites.here(), self._is_first, condition))
            if again is not None:
                self._answered[again] = answer
        return answer

    def _check(self, question: Any) -> bool:
        """Note ``torch._check`` of numbers read from the batch, which export leaves to the run.

        Return True for an equation of one number of selected rows: PyTorch would put the other side in the place of
        the number, by which the rows are known.
        """
        tracer, makers = self._makers_of(question)
        calls = [node for node in makers.values() if node is not None]
        if isinstance(question, sympy.Eq) and [packet_of(node.target) for node in calls] == [aten.index]:
            return True
        if makers:
            self._assumed.checks(self._sites.here(), condition_of(question, True, makers, tracer))
        return False

    def _makers_of(self, question: Any) -> tuple[Any, dict[Any, fx.Node | None]]:
        """Return the tracer, and the call that made each number in a question; none if these are not of data."""
        mode = proxy_tensor.get_proxy_mode()
        if mode is None or not isinstance(question, (sympy.Rel, BooleanFunction)):
            return None, {}
        symbols = sorted(question.free_symbols, key=str)
        return mode.tracer, {symbol: self._maker(mode.tracer.graph, symbol) for symbol in symbols}

    def _identity(self, question: Any, makers: Mapping[Any, fx.Node | None]) -> Any:
        """Return a key that is equal for the same question about the same value; None if that was written to."""
        nodes = reads_of(makers)
        near = [n for node in nodes for n in (node, *node.all_input_nodes)]
        if len(nodes) < len(makers) or any(is_mutable(user.target) for n in near for user in n.users):
            return None
        names = {symbol: sympy.Symbol(f"n{i}") for i, symbol in enumerate(makers)}
        return question.subs(names), *map(self._keys, nodes)

    def _of_mask(self, question: Any, makers: Mapping[Any, fx.Node | None]) -> bool | None:
        """Return the answer to the question whether a mask selects any row; None for other questions."""
        if not isinstance(question, sympy.Rel) or len(makers) != 1:
            return None
        symbol, node = next(iter(makers.items()))
        found = _mask_asked(node, question, symbol) if node is not None else None
        if found is None:
            return None
        root, if_empty = found[0], found[1]
        if any(is_mutable(user.target) and user.args[0] is n for n in _chain(root) for user in n.users):
            return None
        number = self._numbers.setdefault(key_of_mask(self._keys, root), len(self.asked))
        if number == len(self.asked):
            self.asked.append(self._sites.here())
            if self._answer(number):
                self.empty.add(number)
        root.meta["asked"] = number
        return if_empty if number in self.empty else not if_empty

    def _of_equal_masks(self, question: Any, makers: list[fx.Node | None]) -> bool | None:
        """Return whether ``x[y == 0]`` and ``z[y == 0]`` have as many rows; None for other questions."""
        masks = [mask for node in makers if node is not None and (mask := _selecting(node)) is not None]
        is_alone = question.func in (sympy.Eq, sympy.Ne) and all(side.is_Symbol for side in question.args)
        if not is_alone or len(masks) != 2 or self._keys(masks[0]) != self._keys(masks[1]):
            return None
        written = {_storage(n.args[0]) for n in masks[0].graph.nodes if is_mutable(n.target)}  # between both, perhaps
        return None if written & set(map(_storage, walk(masks, operands))) else question.func is sympy.Eq

    def _maker(self, graph: fx.Graph, symbol: Any) -> fx.Node | None:
        new: list[fx.Node] = []
        for node in reversed(graph.nodes):
            if node is self._last:
                break
            new.append(node)
        for node in reversed(new):
            self._last = node
            for number in _numbers(node.meta.get("val")):
                self._makers.setdefault(number, node)
        return self._makers.get(symbol)


def _chain(root: fx.Node) -> list[fx.Node]:
    """Return the mask and its views, which a write would change."""
    return [root, *(n for n in root.users if n.op == "call_function" and root_of(n) is root)]


def _numbers(value: Any) -> set[Any]:
    values = value if isinstance(value, (tuple, list)) else [value]
    sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else [v])]
    kinds = (torch.SymInt, torch.SymBool)
    return {s for n in sizes if isinstance(n, kinds) for s in n.node.expr.free_symbols}


def _mask_asked(node: fx.Node, question: sympy.Rel, symbol: sympy.Symbol) -> tuple[fx.Node, bool] | None:
    """Return the mask that a question is about, and the answer if it selects nothing."""
    read = node.args[0]
    if packet_of(node.target) in (aten.item, aten._local_scalar_dense):
        if not isinstance(read, fx.Node):
            return None
        if read.meta["val"].dtype == torch.bool:
            found = _truth(read)
            differs = bool(question.subs(symbol, 0)) != bool(question.subs(symbol, 1))
            return (found[0], bool(question.subs(symbol, int(found[1])))) if found is not None and differs else None
        at = _sign(question, symbol)
        return (root_of(read), at) if at is not None and is_count(read) else None
    mask, at = _selecting(node), _sign(question, symbol)
    return (root_of(mask), at) if at is not None and mask is not None else None


def _storage(node: Any) -> int | None:
    """Return the memory that a value shares with its views; None if it is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return storage_of(value) if isinstance(value, Tensor) else None


def _selecting(node: fx.Node) -> fx.Node | None:
    """Return the mask of a call that selects rows; None for other calls."""
    read, selects = (
        node.args[0],
        packet_of(node.target) in (aten.nonzero, aten.nonzero_numpy, aten.argwhere, aten.where),
    )
    if packet_of(node.target) is aten.index:
        masks = [n for n in node.args[1] if isinstance(n, fx.Node)]  # pyright: ignore
        read, selects = (masks[0], masks[0].meta["val"].dtype == torch.bool) if len(masks) == 1 else (None, False)
    return read if selects and isinstance(read, fx.Node) else None


def _told_inside(question: Any) -> bool | None:
    """Answer an op that checks whether its operand is empty, below the recorded calls: it is not. The call itself is
    what runs, on empty operands too.
    """
    symbols: Any = question.free_symbols if isinstance(question, sympy.Rel) else ()
    at = _sign(question, next(iter(symbols))) if len(symbols) == 1 else None
    return None if at is None or proxy_tensor.get_proxy_mode() is not None else not at


def _sign(question: sympy.Rel, symbol: sympy.Symbol) -> bool | None:
    """Return the truth of a relation at 0, if it is the opposite for every greater number."""
    left, right = (sympy.sympify(side) for side in question.args)
    both: Any = sympy.Poly(left - right, symbol)  # pyright: ignore
    at = [bool(question.subs(symbol, n)) for n in (0, 1, 2)]
    return at[0] if both.degree() == 1 and at[1] == at[2] != at[0] else None


def _truth(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """Return the mask on which a bool depends, and its value if nothing is selected."""
    packet = packet_of(node.target)
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return None
    if first.meta["val"].dtype == torch.bool and (packet is aten.logical_not or node.target is aten.ne.Scalar):
        found = _truth(first)
        flips = packet is aten.logical_not
        return None if found is None or (not flips and node.args[1] != 0) else (found[0], found[1] != flips)
    if packet is aten.any:
        return root_of(node), False
    compared = node.args[1] if len(node.args) > 1 else None
    signs = {(aten.eq, 0): True, (aten.le, 0): True, (aten.lt, 1): True}
    signs |= {(aten.ne, 0): False, (aten.gt, 0): False, (aten.ge, 1): False}
    if isinstance(compared, int) and (packet, compared) in signs and is_count(first):
        return root_of(first), signs[(packet, compared)]
    return None
