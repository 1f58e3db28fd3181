"""Engines that only evaluate find what engines that train find, on every layout, and hold weights alone."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from passes.errors import PlanError
from runtime import Engine
from runtime.engine.log_probs import Scores
from runtime.profiling.memory import held_bytes, measured_evaluation
from runtime.report.memory_rows import Compared
from tests.tools.jobs import Batches
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS


class Evaluated(NamedTuple):
    """``bytes``: that the engine holds between calls."""

    loss: float
    scores: Scores | None
    parameters: dict[str, Tensor]
    bytes: int


def found_by(engine: Engine, batches: Batches, *, scores: bool = True) -> Evaluated:
    scored = engine.score(batches[0]) if scores else None
    loss = engine.evaluate(batches[0])
    return Evaluated(loss, scored, engine.gather_parameters(), held_bytes(engine))


def trained_and_saved(plan: Any, batches: Batches, directory: str, scores: bool = True) -> Evaluated:
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        engine.save(directory)
        return found_by(engine, batches, scores=scores)


def evaluated_alone(plan: Any, batches: Batches, directory: str | None, scores: bool = True) -> Evaluated:
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        if directory is not None:
            engine.load(directory)
        return found_by(engine, batches, scores=scores)


def memory_to_evaluate(plan: Any, batches: Batches) -> list[Compared]:
    return measured_evaluation(plan, batches[0])


CALLS = (
    "train_step", "forward_backward", "optimizer_step", "find_nonfinite", "capture_graphs", "gather_gradients", "save",
    "averaged_weights",
)  # fmt: skip


def refused_to_train(plan: Any, batches: Batches) -> dict[str, str]:
    """What each call that trains says in this mode."""
    given: dict[str, tuple[Any, ...]] = {"save": ("nowhere",)}
    given |= {name: (batches[0],) for name in ("train_step", "forward_backward", "find_nonfinite")}
    told = {}
    with Engine(plan, mode="evaluate", timeout_seconds=HANG_SECONDS) as engine:
        for name in CALLS:
            try:
                entered = getattr(engine, name)(*given.get(name, ()))
                if name == "averaged_weights":
                    entered.__enter__()
            except PlanError as error:
                told[name] = str(error)
    return told


INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
FOLDED = {"pipeline": {"schedule": "zero_bubble_v"}}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
RECOMPUTED = {"recompute": "full"}
LAYOUTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "tp 2, pp 2": ("gpt2", {"tp": 2, "pp": 2}, SEQUENCE),
    "two chunks a rank": ("gpt2", {"pp": 2, "vpp": 2}, INTERLEAVED),
    "two chunks a rank in a v": ("gpt2", {"pp": 2, "vpp": 2}, FOLDED),
    "cp 2, dp 2": ("gpt2", {"cp": 2, "dp": 2}, RECOMPUTED),
    "experts of their own ranks": ("mixtral", {"dp": 2, "ep": 2}, {}),
    "weights in shards": ("llama", {"dp": 2}, {"optimizer": {"zero": 3}}),
    "weights in shards, pp 2": ("gpt2", {"dp": 2, "pp": 2}, {"optimizer": {"zero": 3}}),
    "gradients in shards": ("llama", {"dp": 2, "tp": 2}, {"optimizer": {"zero": 2}}),
    "experts in shards": ("mixtral", {"dp": 2, "ep": 2}, {"optimizer": {"zero": 3}}),
    "adapters": ("lora", {"tp": 2}, {}),
}
CLOSE = {"cp 2, dp 2": 1.07}  # a known gap: docs/limits.md


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_an_engine_without_state_finds_what_a_training_one_finds(lab: Lab, case: str, tmp_path: Path) -> None:
    model, mesh, rest = LAYOUTS[case]
    directory = str(tmp_path / "run")
    trained = lab.run(Case(model, mesh, rest, job=trained_and_saved, job_arguments=(directory,)))
    alone = lab.run(Case(model, mesh, rest, job=evaluated_alone, job_arguments=(directory,)))
    one = {"optimizer": {"name": "sgd"}}  # another layout, and another optimizer than the save's
    elsewhere = lab.run(Case(model, {}, one, job=evaluated_alone, job_arguments=(directory,)))
    assert alone[0].loss == trained[0].loss
    assert elsewhere[0].loss == pytest.approx(trained[0].loss, rel=1e-7)  # these models compute theirs in float32
    assert alone[0].scores.log_probabilities.equal(trained[0].scores.log_probabilities)
    for found in (alone[0], elsewhere[0]):
        assert found.parameters.keys() == trained[0].parameters.keys()
        assert all(found.parameters[name].equal(x) for name, x in trained[0].parameters.items())
    for state, none in zip(trained, alone, strict=True):
        assert none.bytes < (1.0 if case == "adapters" else 0.6) * state.bytes  # a frozen base has no state


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_rank_holds_its_parameters_and_one_microbatch_as_the_plan_says(lab: Lab, case: str) -> None:
    model, mesh, rest = LAYOUTS[case]
    for rows in lab.run(Case(model, mesh, rest, job=memory_to_evaluate)):
        assert rows
        for row in rows:
            follows_routing = row.category == "activations" and model == "mixtral"  # more rows than the planned mean
            is_near = row.passed or (case in CLOSE and row.measured <= CLOSE[case] * row.predicted)
            assert is_near or follows_routing, rows


@pytest.mark.slow
def test_calls_that_train_are_refused(lab: Lab) -> None:
    (told,) = lab.run(Case("gpt2", {}, {"optimizer": {"ema": 0.5}}, job=refused_to_train))
    assert list(told) == list(CALLS)
    for name, words in told.items():
        assert f"{name} needs gradients or optimizer state, and an engine with mode 'evaluate' has none" in words


def test_an_unknown_mode_is_refused() -> None:
    from runtime import Engine

    plan: Any = None
    with pytest.raises(PlanError, match=r"no mode 'test'.*\n.*\n.*use 'train' or 'evaluate'"):
        Engine(plan, mode="test")  # pyright: ignore
