"""Infer rules of ops by trials: dims of a call that are independent, or summed over.

The call runs on random values of its shapes (large leading dims cut down), then on the parts of each dim that could be
a factor. A factor is accepted if result and gradients agree on values around zero, on positive and on large values,
also if one half is far larger than the other. Every other dim is mixed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from passes.errors import PlanError
from passes.partition.typings.table import has_rule
from passes.program.ops.aten import draws, is_mutable
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.rules.notation import Pattern
from passes.rules.rule import EACH, MIX, RESULT, SUM, Factor, Place, operands_of
from passes.rules.table import rule_of
from passes.rules.trials import by_parts, called, run_call
from planner.capture.gradients.applications import (
    MEMORY_FIX,
    READS_MEMORY,
    SAMPLES,
    Application,
    LowestPrecision,
    Sample,
    Shape,
    draw,
    follows_memory,
    has_gradient,
    on_the_side,
)
from planner.capture.gradients.trials import LARGER, MANY_ELEMENTS, equal_up_to_rounding, tolerance_of

TOO_MANY_ELEMENTS = 10**7
MOST_TRIED = 64  # places of one factor
MOST_PARTS = 8

Shapes = tuple[tuple[int, ...], ...]
T = TypeVar("T")


def infer_rules(program: Program) -> None:
    """Write into ``meta["inferred"]`` the pattern of each call without a rule that a trial could run.

    A call that computes something else when its operands have other strides gets contiguous ones. Raises PlanError if
    they were not contiguous in the capture.
    """
    known: dict[Any, tuple[Pattern | None, bool]] = {}
    for node in list(program.graph.graph.nodes):
        if not has_rule(node.target) and _is_unknown(node):
            key = _signature(node)
            if key not in known:
                known[key] = inferred(node), _reads_in_order(node)
            pattern, in_order = known[key]
            if pattern is not None:
                node.meta["inferred"] = pattern
            if in_order:
                _lay_out_operands(node)


def inferred(node: fx.Node) -> Pattern | None:
    """Return the pattern of a call; None if every trial fails, or no dim of it is a factor."""

    def pattern(trial: _Trial) -> Pattern | None:
        with on_the_side():
            factors = trial.factors()
        return _pattern(trial.shapes, trial.result, factors) if factors else None

    return _first(node, pattern)


def _reads_in_order(node: fx.Node) -> bool:
    trial = _first(node, lambda trial: trial)
    if trial is None or not trial.follows_memory():
        return False
    if not all(shape.is_contiguous for shape in trial.use.shapes):
        raise PlanError(f"{node.target} {READS_MEMORY}", where=where_of(node), fix=MEMORY_FIX)
    return True


def _lay_out_operands(node: fx.Node) -> None:
    for operand in operands_of(node):
        with node.graph.inserting_before(node):
            laid_out = node.graph.call_function(torch.ops.aten.contiguous.default, (operand,))
        laid_out.meta = {**node.meta, "val": operand.meta["val"], "grad": operand.meta["grad"]}
        laid_out.meta.pop("inferred", None)
        node.replace_input_with(operand, laid_out)


def _first(node: fx.Node, run: Callable[[_Trial], T | None]) -> T | None:
    """Return the result of ``run`` for the first trial that runs and for which it is not None."""
    shapes = tuple(Shape.of(n.meta["val"], True) for n in operands_of(node))
    use = Application(node.target, shapes, where_of(node))  # pyright: ignore[reportArgumentType]

    def tried(attempt: Application) -> T | None:
        if attempt.num_elements > TOO_MANY_ELEMENTS:
            return None
        with on_the_side():
            trial = _trial(node, attempt)
        return run(trial)

    return use.first(MANY_ELEMENTS, tried)


def _is_unknown(node: fx.Node) -> bool:
    """Return whether a call needs a trial: ops of PyTorch without a rule only if gradients pass through them."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace == "aten" and not any(n.meta.get("grad") for n in node.all_input_nodes):
        return False
    operands = operands_of(node)
    values = [n.meta.get("val") for n in (node, *operands)]
    is_plain = all(isinstance(v, Tensor) for v in values) and not draws(node.target) and not is_mutable(node.target)
    of_numbers = is_plain and any(has_gradient(n.meta["val"].dtype) for n in operands)
    return of_numbers and len(set(operands)) == len(operands) and rule_of(node) is None


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """Return a key that is equal for calls that need only one trial."""
    given = fx.map_arg(
        (node.args, dict(node.kwargs)),  # pyright: ignore[reportArgumentType]
        lambda n: f"{list(n.meta['val'].shape)} {n.meta['val'].stride()} {n.meta['val'].dtype}",
    )
    return (node.target, str(given))


def _trial(node: fx.Node, use: Application) -> _Trial:
    waiting = draw(use, SAMPLES[0])
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: waiting.pop(0))  # pyright: ignore
    with LowestPrecision() as seen:
        result = called(node.target, *args, **kwargs)[0].meta["val"]
    return _Trial(node, use, tuple(result.shape), tolerance_of(seen.dtype))


@dataclass(frozen=True)
class _Trial:
    """One call at one size and precision. ``result``: the shape of its result."""

    node: fx.Node
    use: Application
    result: tuple[int, ...]
    tolerance: float

    @property
    def shapes(self) -> Shapes:
        return tuple(shape.sizes for shape in self.use.shapes)

    def factors(self) -> list[Factor]:
        """Return the factors of dims of the result, then those that are summed over."""
        found: list[Factor] = []
        for dim, size in enumerate(self.result):
            found += self._first(_possible(self.shapes, size, found, Factor(EACH, size, (Place(RESULT, dim),))))
        for size in sorted({n for shape in self.shapes for n in shape}):
            found += self._first(_possible(self.shapes, size, found, Factor(SUM, size, ())))
        return found

    def follows_memory(self) -> bool:
        def run(values: list[Tensor]) -> list[Tensor | None]:
            result, gradients = run_call(self.node, values)
            return [result, *gradients.values()]

        with on_the_side():
            values = draw(self.use, SAMPLES[0])
            return follows_memory(run, values, lambda a, b: equal_up_to_rounding(a, b, self.tolerance))

    def _first(self, possible: Iterator[Factor]) -> list[Factor]:
        return next(([f] for f in itertools.islice(possible, MOST_TRIED) if self._holds(f)), [])

    def _holds(self, factor: Factor) -> bool:
        least = next(n for n in range(2, factor.size + 1) if factor.size % n == 0)
        numbers = {least, factor.size} if factor.size <= MOST_PARTS else {least}
        trials = itertools.product(SAMPLES, (False, True), numbers)
        return all(self._agrees(factor, self._values(factor, s, uneven), parts) for s, uneven, parts in trials)

    def _values(self, factor: Factor, sample: Sample, is_uneven: bool) -> list[Tensor]:
        values = draw(self.use, sample)
        for place in factor.places if is_uneven else ():
            if place.operand != RESULT and has_gradient(values[place.operand].dtype):
                values[place.operand].narrow(place.dim, 0, factor.size // 2).mul_(LARGER)
        return values

    def _agrees(self, factor: Factor, values: list[Tensor], parts: int) -> bool:
        named = {n.name: value for n, value in zip(operands_of(self.node), values, strict=True)}
        try:
            return all(
                equal_up_to_rounding(a, b, self.tolerance) for _, a, b in by_parts(self.node, factor, named, parts)
            )
        except Exception:  # an op may refuse a part
            return False


def _possible(shapes: Shapes, size: int, found: list[Factor], factor: Factor) -> Iterator[Factor]:
    """Yield ``factor`` with one free dim of its size, or none, in each operand; in most operands first."""
    taken = {(p.operand, p.dim) for f in found for p in f.places}
    free = [[Place(i, d) for d, n in enumerate(s) if n == size and (i, d) not in taken] for i, s in enumerate(shapes)]
    chosen = itertools.product(*([*places, None] for places in free)) if size > 1 else ()
    for places in sorted(chosen, key=lambda places: places.count(None)):
        held = tuple(place for place in places if place is not None)
        if held:
            yield Factor(factor.role, size, (*held, *factor.places))


def _pattern(shapes: Shapes, result: tuple[int, ...], factors: list[Factor]) -> Pattern:
    """Return the pattern with a letter for each factor, and one for each dim that has none."""
    letters = (chr(ord("a") + i % 26) + str(i // 26 or "") for i in itertools.count())
    words = {(p.operand, p.dim): word for f, word in zip(factors, letters, strict=False) for p in f.places}
    roles = {words[f.places[0].operand, f.places[0].dim]: f.role for f in factors}
    terms: list[tuple[str, ...]] = []
    for operand, shape in (*enumerate(shapes), (RESULT, result)):
        for dim in range(len(shape)):
            if (operand, dim) not in words:
                words[operand, dim] = next(letters)
                roles[words[operand, dim]] = MIX
        terms.append(tuple(words[operand, dim] for dim in range(len(shape))))
    return Pattern(tuple(terms[:-1]), terms[-1], roles)
