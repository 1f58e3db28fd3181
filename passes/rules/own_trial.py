"""Try a rule that a user gives: the op runs on an example, and on the parts of each factor of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.rules.call import Call, call_of
from passes.rules.notation import Pattern
from passes.rules.rule import OpRule
from passes.rules.trials import called, tried

SIZES = (4, 6, 8, 10, 12, 14, 16, 18)  # of the words: even, and no two are equal
SCALES = (1.0, 30.0)  # of random values
FREE_SIZES = (2, 3)  # of the dims that "..." stands for


class NotTrue(Exception):
    """The text continues "the rule of ..."; ``fix``: the remedy."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what)
        self.fix = fix


def try_rule(
    rule: Callable[[Call], OpRule | None], target: Any, pattern: Pattern, example: Sequence[Any] | None
) -> None:
    """Raises NotTrue if the rule does not fit the example, or is not true of it."""
    problem = ""
    for args in [tuple(example)] if example is not None else _examples(pattern):
        try:
            node, values = called(target, *args)
        except Exception as error:  # whatever an op raises on tensors that it was not written for
            problem = problem or f"{type(error).__name__}: {_first_line(error)}"
            continue
        return _check(rule, node, values)
    raise NotTrue(
        f"could not be tried: the op fails on an example ({problem})", "give arguments that it runs on: example=(x, w)"
    )


def _check(rule: Callable[[Call], OpRule | None], node: fx.Node, values: dict[str, Tensor]) -> None:
    call = call_of(node)
    found = rule(call) if call is not None else None
    if call is None or found is None:
        shapes = ", ".join(str(list(x.shape)) for x in values.values())
        raise NotTrue(
            f"does not fit the example {shapes} -> {list(call.result) if call is not None else node.meta['val']}",
            "give each dim of each operand a word, and each word one size",
        )
    try:
        _tried(node, found, values)
    except AssertionError as error:
        raise NotTrue(
            f"is not true of an example: {_first_line(error)}",
            'mark a word that is summed over with "+", and one that is neither with "^"',
        ) from None


def _tried(node: fx.Node, rule: OpRule, values: dict[str, Tensor]) -> None:
    """By values alone for an op without a backward; in float64 on large values too."""
    scales = SCALES if all(x.dtype == torch.float64 for x in values.values() if x.is_floating_point()) else SCALES[:1]
    for scale in scales:
        scaled = {name: x * scale if x.is_floating_point() else x for name, x in values.items()}
        try:
            tried(node, rule, scaled)
        except RuntimeError:
            with torch.no_grad():
                tried(node, rule, scaled)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _examples(pattern: Pattern) -> Iterator[tuple[Tensor, ...]]:
    """Random tensors in float64, and in float32 for an op that knows no other."""
    words = dict.fromkeys(w for term in (*pattern.operands, pattern.result) for w in term if w != "...")
    sizes = dict(zip(words, SIZES * len(words), strict=False))
    for dtype in (torch.float64, torch.float32):
        generator = torch.Generator().manual_seed(0)
        shapes = [[n for w in t for n in (FREE_SIZES if w == "..." else (sizes[w],))] for t in pattern.operands]
        yield tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
