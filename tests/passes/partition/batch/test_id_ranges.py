"""Which ids and labels a model takes, found in its graph; what is refused fails in the unmodified model too."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from examples.gpt import GPT
from passes.errors import PlanError
from passes.partition.batch.id_ranges import id_ranges
from planner import plan
from planner.capture.export import capture
from runtime.data.batches import check_ids
from tests.models.families import build
from tests.tools.captures import plan_again
from tests.tools.examples import examples

ROWS, CLASSES, LENGTH, BATCH = 11, 7, 5, 4
BEYOND = 10_000


class Model(nn.Module):
    """Logits of ids by the first function, their loss against labels by the second."""

    def __init__(self, look_up: Callable[[Model, Tensor], Tensor], compare: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(ROWS, 6), nn.Linear(6, CLASSES)
        self.look_up, self.compare = look_up, compare

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.compare(self.head(self.look_up(self, ids)), labels)


def padded_shift(logits: Tensor, labels: Tensor) -> Tensor:
    following = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.flatten(0, 1), following.reshape(-1))


def sliced_shift(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def copied_shift(logits: Tensor, labels: Tensor) -> Tensor:
    following = torch.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=3)


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).mean()


def filled(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.masked_fill(labels > 5, -100).flatten())


def per_sequence(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.mean(1), labels[:, 2])


def halves(logits: Tensor, labels: Tensor) -> Tensor:
    first, second = labels.chunk(2)
    return F.cross_entropy(logits.flatten(0, 1), torch.cat([second, first]).flatten())


def all_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1).mean() + labels.sum() * 0.0


def margin(logits: Tensor, labels: Tensor) -> Tensor:
    return plain(logits - 0.2 * F.one_hot(labels, CLASSES), labels)


def table(m: Model, ids: Tensor) -> Tensor:
    return m.table(ids)


ALL, LATER = ((0, LENGTH),), ((1, LENGTH),)
CASES: dict[str, tuple[Any, Any, dict[str, list[tuple]]]] = {
    "plain": (table, plain, {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, 3, ALL)]}),
    "one-hot too": (
        table,
        margin,
        {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, None, ALL), (0, CLASSES, 3, ALL)]},
    ),
    "padded shift": (table, padded_shift, {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, -100, LATER)]}),
    "sliced shift": (table, sliced_shift, {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, -100, LATER)]}),
    "copied shift": (table, copied_shift, {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, -100, LATER)]}),
    "gathered": (table, gathered, {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, None, ALL)]}),
    "filled labels": (table, filled, {"ids": [(0, ROWS, None, ALL)]}),
    "one label a sequence": (
        table,
        per_sequence,
        {"ids": [(0, ROWS, None, ALL)], "labels": [(0, CLASSES, -100, ((2, 3),))]},
    ),
    "halves of the batch": (table, halves, {"ids": [(0, ROWS, None, ALL)]}),
    "indexed": (
        lambda m, ids: m.table.weight[ids],
        all_logits,
        {"ids": [(-ROWS, ROWS, None, ALL)]},
    ),
    "selected": (
        lambda m, ids: m.table.weight.index_select(0, ids.reshape(-1)).view(*ids.shape, -1),
        all_logits,
        {"ids": [(0, ROWS, None, ALL)]},
    ),
    "wrapped": (lambda m, ids: m.table(ids % ROWS), filled, {}),
    "clamped": (lambda m, ids: m.table(ids.clamp(max=ROWS - 1)), filled, {}),
    "narrowed": (lambda m, ids: m.table(ids.to(torch.int32)), filled, {}),
    "turned": (lambda m, ids: m.table(ids.t()).transpose(0, 1), filled, {"ids": [(0, ROWS, None, ALL)]}),
    "turned, then cut": (
        lambda m, ids: m.table(ids.t()[1:]).transpose(0, 1),
        all_logits,
        {"ids": [(0, ROWS, None, LATER)]},
    ),
    "in two tables": (
        lambda m, ids: m.table(ids) + m.table.weight[:9][ids],
        all_logits,
        {"ids": [(0, ROWS, None, ALL), (-9, 9, None, ALL)]},
    ),
}


def batch_of(**changed: Tensor) -> dict[str, Tensor]:
    made = {
        name: torch.randint(4, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
        for name in ("ids", "labels")
    }
    return made | changed


@cache
def ranges_of(case: str) -> tuple[nn.Module, dict[str, Any]]:
    look_up, compare, _ = CASES[case]
    model = Model(look_up, compare)
    return model, id_ranges(capture(model, batch_of()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_ranges_are_those_of_what_is_looked_up(case):
    _, found = ranges_of(case)
    assert {n: [(r.low, r.high, r.skipped, r.part) for r in ranges] for n, ranges in found.items()} == CASES[case][2]


DOUBTED = {"filled labels", "halves of the batch", "wrapped", "clamped", "narrowed", "turned"}


@pytest.mark.thorough
@examples(300)
@given(
    st.sampled_from(sorted(CASES)),
    st.sampled_from(["ids", "labels"]),
    st.integers(0, BATCH - 1),
    st.integers(0, LENGTH - 1),
    st.sampled_from([-101, -100, -ROWS - 1, -ROWS, -1, 0, CLASSES - 1, CLASSES, 8, 9, ROWS - 1, ROWS, BEYOND]),
)
def test_a_batch_is_refused_where_the_unmodified_model_fails_and_nowhere_else(case, name, row, column, value):
    """Where the graph leaves a doubt, some batches that fail are not refused."""
    model, ranges = ranges_of(case)
    batch = batch_of()
    batch[name][row, column] = value
    try:
        model(**batch)
        fails = False
    except (IndexError, RuntimeError):
        fails = True
    refused = ""
    for key, tensor in batch.items():
        try:
            check_ids(key, tensor, ranges.get(key, ()))
        except PlanError as error:
            refused = str(error)
    assert fails if refused else not fails or case in DOUBTED
    assert not refused or f"batch['{name}'] holds {value} at [{row}, {column}]; " in refused


FAMILIES = ("gpt2", "llama", "bert", "t5", "vit")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_take_their_own_batches_and_nothing_that_they_fail_on(family):
    pytest.importorskip("transformers")
    entry = build(family)
    batch = entry.batch(2, seed=3)
    ranges = id_ranges(capture(entry.model, entry.batch(2, seed=4)))
    assert ranges
    for name, asked in ranges.items():
        check_ids(name, batch[name], asked)
        for ids in asked:
            bad = batch[name].clone()
            bad[(1, *(start for start, _ in ids.part))] = ids.high
            with pytest.raises(PlanError, match=f"holds {ids.high} at"):
                check_ids(name, bad, asked)
            with pytest.raises((IndexError, RuntimeError)):
                entry.model(**batch | {name: bad})


def spec(high: int) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": high}
    return {"mesh": {"tp": 1}, "batch": {"global": 4, "micro": 4}, "inputs": {"ids": ids, "labels": ids | {"high": 4}}}


def test_a_spec_that_draws_beyond_the_vocabulary_is_told_in_the_plan():
    decided = plan(Model(table, plain), spec(ROWS + 1))
    (row,) = (row for row in decided.diagnostics if row.where == "inputs.ids.high")
    assert (row.level, row.fix) == ("warning", "set high: 11, or less")
    assert row.what == "inputs.ids.high is 12, but the embedding table has rows 0 to 10"
    assert not [row for row in plan(Model(table, plain), spec(ROWS)).diagnostics if row.level == "warning"]


def test_a_batch_on_a_device_is_not_looked_at():
    _, ranges = ranges_of("gathered")
    check_ids("ids", torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta"), ranges["ids"])


# ---- a sequence longer than the positions of a model is refused when planning, with the model's line


def spec_of_lookups(length: int) -> dict:
    inputs = {"input_ids": {"shape": [length], "dtype": "int64", "high": 32}, "targets": {"like": "input_ids"}}
    return {"mesh": {}, "batch": {"global": 2, "micro": 1}, "inputs": inputs}


@pytest.mark.thorough
def test_a_sequence_as_long_as_the_positions_is_planned_and_one_longer_is_refused() -> None:
    model = GPT(vocabulary=32, length=8, width=16, num_layers=1, num_heads=2)
    assert plan_again(model, spec_of_lookups(8)).stages
    with pytest.raises(PlanError, match="the embedding positions has 8 rows, but the model looks up row 8") as error:
        plan_again(model, spec_of_lookups(9))
    assert "gpt.py" in str(error.value.where)
    assert "self.positions(positions)" in str(error.value.where)


class Shifted(nn.Module):
    """Positions from 2 on, as in RoBERTa; and of the batch where it gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(32, 8), nn.Embedding(10, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(2, 2 + input_ids.shape[1]) if position_ids is None else position_ids
        logits = self.head(self.tokens(input_ids) + self.positions(places))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_positions_are_computed_as_the_model_does() -> None:
    assert plan_again(Shifted(), spec_of_lookups(8)).stages
    with pytest.raises(PlanError, match="has 10 rows, but the model looks up row 10"):
        plan_again(Shifted(), spec_of_lookups(9))


def test_positions_of_the_batch_are_left_to_the_check_of_the_batch() -> None:
    given = spec_of_lookups(9)
    given["inputs"]["position_ids"] = {"like": "input_ids"}
    assert plan_again(Shifted(), given).stages
