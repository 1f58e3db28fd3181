"""What ranks run to evaluate without any state of training, and what a training engine finds on the same batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from passes.errors import PlanError
from runtime import Engine
from runtime.engine.log_probs import Scores
from runtime.profiling.memory import held_bytes, measured_evaluation
from runtime.report.memory_rows import Compared
from tests.tools.jobs import Batches
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
