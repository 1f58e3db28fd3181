"""Batches of several lengths in one run train as one process does, on every layout: losses, parameters, evaluations."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from passes.errors import PlanError, SpecError
from planner import Plan, plan
from runtime import Engine
from tests.models import families
from tests.models.families import Entry
from tests.tools.laboratory import name_of, session_lab
from tests.tools.training import ADAMW, Trained, spec_of, trained_alone, trained_on

THIRDS = (1, 1 / 3, 2 / 3, 1, 1 / 3)
PLANNED = {"global": 8, "micro": 2}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"], "warmup_steps": 1}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one": ({}, {}),
    "tp2, sequence parallel": ({"tp": 2}, SEQUENCE),
    "pp2": ({"pp": 2}, {}),
    "dp2": ({"dp": 2}, {}),
    "cp2·tp2": ({"cp": 2, "tp": 2}, {}),
    "pp2·vpp2, interleaved": ({"pp": 2, "vpp": 2}, {"pipeline": {"schedule": "interleaved_1f1b"}}),
    "pp2·dp2, zero bubble, recomputed": (
        {"pp": 2, "dp": 2},
        {"pipeline": {"schedule": "zero_bubble"}, "recompute": "full"},
    ),
    "tp2·pp2, graphs": ({"tp": 2, "pp": 2}, GRAPHS),
    "tp2, one graph": ({"tp": 2}, {"cuda_graphs": {"impl": "emulate", "scope": ["full_iteration"], "warmup_steps": 1}}),
}


def batches_of(entry: Entry, lengths: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """A batch of each length, with its number of sequences."""
    pairs = enumerate(zip(lengths, numbers, strict=True))
    return [
        {name: x[:, :length].contiguous() for name, x in entry.batch(number, seed).items()}
        for seed, (length, number) in pairs
    ]


def lengths_of(entry: Entry, shares: Sequence[float]) -> list[int]:
    """Those that are such shares of the sequences of ``entry``."""
    return [int(next(iter(entry.inputs.values()))[0][0] * share) for share in shares]


def alone(entry: Entry, batches: Sequence[dict[str, Tensor]]) -> Trained:
    trained = [p for p in entry.model.parameters() if p.requires_grad]
    update = torch.optim.AdamW(trained, ADAMW["lr"], ADAMW["betas"], weight_decay=ADAMW["weight_decay"])
    return trained_alone(entry.model, entry.loss, batches, update)


def both(host: Any, name: str, numbers: Sequence[int], sections: dict[str, Any]) -> Any:
    """What the ranks found, and one process, over lengths in turn; and lengths and sequences of the plan."""
    entry = families.build(name)
    lengths = lengths_of(entry, THIRDS)
    batches, spec = batches_of(entry, lengths, numbers), spec_of(entry, sorted(set(lengths)), **sections)
    decided = plan(entry.model, spec)
    found = trained_on(host, decided, batches)
    entry = families.build(name)
    entry.model.to(getattr(torch, spec["precision"]["parameters"]))
    return found, alone(entry, batches), [(row.length, row.sequences) for row in decided.lengths]


def compared(name: str, numbers: tuple[int, ...], limit: float, **sections: Any) -> list[tuple[int, int]]:
    """Of one run of five steps; returns the lengths of the plan, and sequences of each."""
    found, truth, rows = session_lab().call(both, name, numbers, sections)
    assert found.losses == pytest.approx(truth.losses, rel=limit)
    # Adam divides by the size of a gradient: rounding moves a step by a share of lr
    assert found.furthest(truth.parameters) <= 30 * limit
    assert found.evaluated[0] == pytest.approx(found.evaluated[3], rel=0.3)
    return rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt", pytest.param("bert", marks=pytest.mark.thorough), "t5"])
def test_lengths_in_turn_train_as_one_process(name: str, layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    rows = compared(name, (8,) * 5, 1e-10, mesh=mesh, batch=PLANNED, **more)
    assert rows == [(4, 8), (8, 8), (12, 8)]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"ep": 2, "dp": 2}, {"cp": 2, "ep": 2}], ids=name_of)
def test_experts_of_several_lengths(mesh: dict[str, int]) -> None:
    compared("mixtral", (8,) * 5, 3e-6, mesh=mesh, batch=PLANNED, precision={"parameters": "float32"})


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["one", "dp2", "pp2", "pp2·dp2, zero bubble, recomputed"])
def test_a_step_of_so_many_tokens_has_more_short_sequences(layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    numbers = tuple({1 / 3: 24, 2 / 3: 12, 1: 8}[share] for share in THIRDS)
    rows = compared("gpt", numbers, 1e-10, mesh=mesh, batch={"tokens": 96, "micro": 2}, **more)
    assert rows == [(4, 24), (8, 12), (12, 8)]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["one", "dp2", "pp2", "pp2·dp2, zero bubble, recomputed"])
def test_a_step_takes_every_number_of_sequences_that_microbatches_divide(layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    compared("gpt", (8, 4, 12, 16, 8), 1e-10, mesh=mesh, batch=PLANNED, **more)


def planned(lengths: list[int], **more: Any) -> tuple[families.Entry, Plan]:
    entry = families.build("gpt")
    spec = spec_of(entry, lengths, mesh={}, **more)
    return entry, plan(entry.model, spec)


def test_a_batch_of_no_planned_length_is_refused() -> None:
    entry, made = planned([4, 12])
    with Engine(made) as engine:
        with pytest.raises(PlanError, match=r"has shape \[8, 7\], the plan expects \[8, 12\]") as error:
            engine.train_step(batches_of(entry, [7], [8])[0])
        assert "4, 12" in error.value.fix


@pytest.mark.thorough
def test_a_saved_plan_has_all_lengths(tmp_path: Any) -> None:
    entry, made = planned([4, 8, 12])
    made.save(tmp_path / "plan.pt")
    found = Plan.load(tmp_path / "plan.pt")
    assert found == made
    assert found.at_length(4) == made.at_length(4) == made.shorter[0]
    batches = batches_of(entry, [8, 4, 12], [8, 8, 8])
    with Engine(found) as engine:
        first = [engine.train_step(batch).loss for batch in batches]
    assert len(set(first)) == 3
    made.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="longest length only"):
        Plan.load(tmp_path / "plan.json").at_length(4)


@pytest.mark.thorough
def test_plans_of_other_lengths_differ() -> None:
    _, made = planned([4, 12])
    _, other = planned([8, 12])
    assert made.hash() != other.hash()
    assert [row.length for row in made.lengths] == [4, 12]
    assert made.memory == planned([12])[1].memory


@pytest.mark.parametrize(
    ("shape", "batch", "what"),
    [
        ([[12, 4]], PLANNED, "do not ascend"),
        ([[4, 12]], {"tokens": 10, "micro": 2}, "is less than"),
        ([[4, 12]], {"tokens": 96, "global": 3, "micro": 1}, "makes 8 sequences a step"),
        ([[4, 12]], {"micro": 2}, "batch.global is missing"),
    ],
)
def test_lengths_that_do_not_go_together_are_refused(shape: Any, batch: dict[str, int], what: str) -> None:
    entry = families.build("gpt")
    spec = spec_of(entry, [12], batch=batch, mesh={})
    spec["inputs"] |= {name: {**given, "shape": shape} for name, given in spec["inputs"].items()}
    with pytest.raises(PlanError, match=what):
        plan(entry.model, spec)


@pytest.mark.thorough
@pytest.mark.parametrize(("lengths", "odd", "sizes"), [([8, 12, 16], 12, "1, 2"), ([8, 12], 12, "1, 2")])
def test_cp_divides_every_length(lengths: list[int], odd: int, sizes: str) -> None:
    entry = families.build("gpt")
    spec = spec_of(entry, lengths, mesh={"cp": 4})
    with pytest.raises(PlanError, match=f"at length {odd}: cp = 4: a sequence of {odd} tokens") as error:
        plan(entry.model, spec)
    assert error.value.fix == f"choose cp from {{{sizes}}}, or lengths that 8 divides"


@pytest.mark.thorough
def test_an_input_of_one_length_beside_one_of_several_is_told() -> None:
    entry = families.build("gpt")
    spec = spec_of(entry, [6, 12], mesh={})
    name = list(spec["inputs"])[-1]
    spec["inputs"][name] = {**spec["inputs"]["input_ids"], "shape": [12]}
    with pytest.raises(SpecError, match=rf"inputs.{name}.shape has the one length 12, but other inputs have \[6, 12\]"):
        plan(entry.model, spec)


@pytest.mark.thorough
def test_weights_and_optimizer_are_one(tmp_path: Any) -> None:
    """Saved after steps of several lengths, resumed at another: bitwise as without the save."""
    entry, made = planned([4, 8, 12])
    batches = batches_of(entry, [12, 4, 8, 4], [8] * 4)
    with Engine(made) as engine:
        losses = [engine.train_step(batch).loss for batch in batches[:2]]
        engine.save(tmp_path)
        losses += [engine.train_step(batch).loss for batch in batches[2:]]
        wanted = engine.gather_parameters()
    with Engine(planned([4, 8, 12])[1]) as engine:
        engine.load(tmp_path)
        assert [engine.train_step(batch).loss for batch in batches[2:]] == losses[2:]
        found = engine.gather_parameters()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
