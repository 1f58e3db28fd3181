"""A model at a second length: its first graph with other numbers, if nothing but numbers differs, else its own export.

Whichever it is, the program is that of a model that is captured at this length alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from passes.errors import PlanError
from passes.program.program import Program
from planner import Captured, plan
from planner import capture as capture_for
from planner.capture.export import capture
from planner.capture.recording import Recording
from planner.capture.resized import Earlier
from tests.models import families
from tests.tools.kept_programs import encode
from tests.tools.training import spec_of

LONG, SHORT = 12, 8


class Reader(nn.Module):
    """Tokens, one layer, and ``between``, which may do something else at each length."""

    def __init__(self, between: Callable[[Reader, Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls = 0

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.between(self, self.embedding(ids))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def microbatch(length: int, rows: int = 2) -> dict[str, Tensor]:
    return {name: torch.empty((rows, length), dtype=torch.int64, device="meta") for name in ("ids", "labels")}


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each run of torch.export."""
    found, original = list[int](), torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return found


def text(program: Program) -> str:
    found, constants = encode(program)
    return json.dumps([found, {name: value.tolist() for name, value in sorted(constants.items())}])


def both(model: nn.Module, exports: list[int]) -> tuple[int, Program]:
    """How often torch.export ran for the second length, and its program, which is that of a capture alone."""
    torch.manual_seed(0)
    earlier = Earlier()
    capture(model, microbatch(LONG), earlier=earlier)
    before = len(exports)
    found = capture(model, microbatch(SHORT), earlier=earlier)
    times = len(exports) - before
    assert text(found) == text(capture(model, microbatch(SHORT)))
    return times, found


def scaled(model: Reader, x: Tensor) -> Tensor:
    return x / x.shape[1] + torch.arange(x.shape[1]).view(1, -1, 1)


def two_halves(model: Reader, x: Tensor) -> Tensor:
    left, right = x.split(x.shape[1] // 2, dim=1)
    with torch.no_grad():
        mean = x[:, : x.shape[1] // 4].mean()
    return torch.cat((right, left), dim=1) - mean


def written(model: Reader, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, x.shape[1] // 2 :] += 1
    return x


@pytest.mark.sampled(1)
@pytest.mark.check
@pytest.mark.parametrize("between", [scaled, two_halves, written])
def test_other_numbers_need_no_export(between: Callable[[Reader, Tensor], Tensor], exports: list[int]) -> None:
    assert both(Reader(between), exports)[0] == 0


def test_calls_are_recorded_only_for_a_second_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found, original = list[int](), Recording.__init__

    def counted(self: Recording, model: nn.Module, kwargs: dict[str, Tensor]) -> None:
        found.append(kwargs["ids"].shape[1])
        original(self, model, kwargs)

    monkeypatch.setattr(Recording, "__init__", counted)
    earlier, model, seen = Earlier(), Reader(scaled), []
    for length in (LONG, SHORT, SHORT + 1):
        capture(model, microbatch(length), earlier=earlier)
        seen.append([*found])
    assert seen == [[], [LONG, SHORT], [LONG, SHORT, SHORT + 1]]


def dead_twin(model: Reader, x: Tensor) -> Tensor:
    """At the first length a slice that nobody reads has the numbers of the one that is read."""
    x[:, : LONG // 3].relu()
    found = x[:, : x.shape[1] // 3].relu()
    x[:, : LONG // 3].relu()
    return x + found.mean()


def test_a_call_without_readers_does_not_stand_for_another(exports: list[int]) -> None:
    both(Reader(dead_twin), exports)


def another_op(model: Reader, x: Tensor) -> Tensor:
    return x.tanh() if x.shape[1] > SHORT else x.sigmoid()


def another_layer(model: Reader, x: Tensor) -> Tensor:
    return (model.first if x.shape[1] > SHORT else model.second)(x)


def another_flag(model: Reader, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > SHORT)


def without_gradient(model: Reader, x: Tensor) -> Tensor:
    with torch.set_grad_enabled(x.shape[1] > SHORT):
        return x + model.first(x)


def under_autocast(model: Reader, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=x.shape[1] <= SHORT):
        return model.first(x).float()


OF_LONG, OF_SHORT = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])


def another_constant(model: Reader, x: Tensor) -> Tensor:
    return x * (OF_LONG if x.shape[1] > SHORT else OF_SHORT).sum()


def one_more_call(model: Reader, x: Tensor) -> Tensor:
    return model.first(x) if x.shape[1] > SHORT else model.first(model.first(x))


def another_order(model: Reader, x: Tensor) -> Tensor:
    a, b = model.first(x), model.first(x)
    return a.detach() + b if x.shape[1] > SHORT else a + b.detach()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "between",
    [
        another_op, another_layer, another_flag, without_gradient, under_autocast, another_constant, one_more_call,
        another_order,
    ],
)  # fmt: skip
def test_a_model_that_branches_on_its_length_is_exported_again(
    between: Callable[[Reader, Tensor], Tensor], exports: list[int]
) -> None:
    assert both(Reader(between), exports)[0] > 0


def counts_short_ones(model: Reader, x: Tensor) -> Tensor:
    if x.shape[1] <= SHORT:
        model.calls += 1
    return x * model.calls if x.shape[1] <= SHORT else x * 0


def left_behind(model: Reader, x: Tensor) -> Tensor:
    """State of the batch and a count, which no later forward reads."""
    model.memory, model.calls = x.detach(), model.calls + 1
    return x * 2


def read_if_early(model: Reader, x: Tensor) -> Tensor:
    model.calls += 1
    return x * 2 if model.calls < 1000 else torch.full_like(x, 2) * x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("between", [scaled, left_behind])
def test_state_that_does_not_matter_needs_no_further_export_nor_does_another_batch_size(
    between: Callable[[Reader, Tensor], Tensor], exports: list[int]
) -> None:
    torch.manual_seed(0)
    earlier, model = Earlier(), Reader(between)
    capture(model, microbatch(LONG), earlier=earlier)
    found = capture(model, microbatch(LONG, 6), is_known=True, earlier=earlier)
    assert len(exports) == 1
    assert text(found) == text(capture(model, microbatch(LONG, 6), is_known=True))


def test_a_later_state_that_is_read_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Python state of earlier calls \(calls\)"):
        capture(Reader(read_if_early), microbatch(LONG), earlier=Earlier())


HIDDEN = iter(range(1_000))


def draws_from_an_iterator(model: Reader, x: Tensor) -> Tensor:
    """State that no attribute shows, moved at the short length alone; only a number differs."""
    return x * (next(HIDDEN) if x.shape[1] <= SHORT else 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("between", [counts_short_ones, draws_from_an_iterator])
def test_state_that_matters_at_the_second_length_alone_is_refused(
    between: Callable[[Reader, Tensor], Tensor],
) -> None:
    earlier, model = Earlier(), Reader(between)
    capture(model, microbatch(LONG), earlier=earlier)
    with pytest.raises(PlanError, match="Python state"):
        capture(model, microbatch(SHORT), earlier=earlier)


def test_a_model_that_fails_at_one_length_is_refused_when_planned() -> None:
    def fails(model: Reader, x: Tensor) -> Tensor:
        return x.view(2, -1, LONG, 8).flatten(1, 2)

    row = {"shape": [[SHORT, LONG]], "dtype": "int64", "high": 32}
    spec = {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": {"ids": row, "labels": {"like": "ids"}}}
    with pytest.raises(PlanError, match=f"at length {SHORT}: the model cannot be captured"):
        plan(Reader(fails), spec)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt", "t5", "llama", "gemma2", "falcon-alibi"])
def test_families_are_exported_once_for_all_lengths(name: str, exports: list[int]) -> None:
    entry = families.build(name)

    def inputs(length: int) -> dict[str, Tensor]:
        spec = spec_of(entry, [length])["inputs"]
        return {
            key: torch.empty((2, length, *given["shape"][1:]), dtype=getattr(torch, given["dtype"]), device="meta")
            for key, given in spec.items()
        }

    earlier, dtype = Earlier(), torch.float64
    capture(entry.model, inputs(LONG), earlier=earlier, dtype=dtype)
    before = len(exports)
    found = capture(entry.model, inputs(SHORT), earlier=earlier, dtype=dtype)
    assert len(exports) == before
    assert text(found) == text(capture(entry.model, inputs(SHORT), dtype=dtype))


@pytest.mark.thorough
def test_a_captured_model_is_exported_once_for_all_lengths(exports: list[int]) -> None:
    entry = families.build("gpt")
    spec = spec_of(entry, [4, 8, 12], mesh={"tp": 2})
    captured = capture_for(entry.model, spec)
    assert isinstance(captured, Captured)
    before = len(exports)
    made = plan(captured, spec)
    assert len(exports) == before
    assert made.hash() == plan(entry.model, spec).hash()
