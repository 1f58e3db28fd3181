"""The command `verify`: train by the plan and in one process on the same random batches, and compare loss, norm,
gradients and parameters of each update.

The reference is the user's unmodified model on the full global batch, the object itself and not a copy
(runtime.verify.reference). With ``dropout: layout_invariant``, both sides draw equal random numbers
(runtime.verify.named_draws). Otherwise dropout is off on both: its masks depend on the order of draws.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from passes.base import RankProgram
from passes.errors import PlanError
from planner.capture.model.eager import in_eager_mode
from planner.capture.model.reference import load_to_plan, pretrained_directory
from planner.frozen_plan import Plan
from planner.lower import check_stages
from planner.spec.spec import Spec
from planner.tables.diagnostics import batch_notes
from runtime.checkpoint.pretrained_load import check_pretrained
from runtime.compiled.requirements import check_machine
from runtime.distributed.agreement import agreed
from runtime.distributed.launch import RankError, launch
from runtime.engine.engine import Engine
from runtime.shared_plan import Planned, planned, shared
from runtime.verify.batches import ignored_apart, random_batch
from runtime.verify.comparison import Beside, EngineStep, Row
from runtime.verify.mutants import without_collective
from runtime.verify.named_draws import NamedDraws, draws_of_lengths
from runtime.verify.reference import OneProcess, Untouched, in_its_dtype, with_values

TIMEOUT_SECONDS = 1800.0
BATCHES_IF_WARNED = 4  # a single batch may be equal by chance
STEPS = 10  # of a learning-rate schedule with steps: auto


@dataclass(frozen=True, slots=True)
class VerifyJob:
    """The settings of a verification, the same on every rank. ``planned``: the file of the launcher's plan
    (``runtime.shared_plan``)."""

    model: str
    spec: str
    num_steps: int = 1
    remove_collective: int | None = None
    tolerance: float | None = None
    planned: str | None = None


def _planned(job: VerifyJob, spec: Spec) -> tuple[Planned, Untouched]:
    """Return the plan, and the fingerprints of its model's weights from before the plan."""
    model = load_to_plan(job.model, spec.seed)
    untouched = Untouched(in_mode(model, spec))
    return planned(model, spec, job.planned), untouched


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of a verification. ``rows``: all comparisons; ``notes``: their limits; ``warnings``: those of the plan
    about batches; ``failure``: the error that ended the run."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and bool(self.rows) and all(row.passed for row in self.rows)

    @property
    def failed_rows(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def __str__(self) -> str:
        lines = [
            f"{kind:<10} {_summary([row for row in self.rows if row.kind == kind])}"
            for kind in ("loss", "norm", "gradient", "parameter")
            if any(row.kind == kind for row in self.rows)
        ]
        worst = sorted(self.failed_rows, key=lambda row: (row.step, -row.severity))
        if worst:
            lines.append(f"first difference: step {worst[0].step} of {max(row.step for row in self.rows)}")
        lines += [f"  {row}" for row in worst[:12]]
        lines += [f"  … and {len(worst) - 12} more"] if len(worst) > 12 else []
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"the run failed: {self.failure}"] if self.failure else []
        last = "EQUAL to one process" if self.passed else "DIFFERENT from one process"
        if self.warnings:
            last += f" on {max((row.step for row in self.rows), default=0)} batches; the plan warns: {self.warnings[0]}"
        return "\n".join([*lines, last])


def verify(
    model_ref: str,
    spec_path: str,
    *,
    steps: int = 1,
    remove_collective: int | None = None,
    tolerance: float | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> VerifyReport:
    """Start the plan's ranks as local processes, and compare ``steps`` updates with one process.

    ``remove_collective``: number of a collective to remove from the lowered graphs, to see the comparison fail.
    ``tolerance``: relative, of loss and gradients; default: by the model's lowest precision.
    Raises PlanError for bad input, RankError when a rank fails.
    """
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise PlanError(f"a tolerance of {tolerance} compares nothing", where="--tolerance", fix="give 0 or more: 1e-6")
    spec = Spec.load(spec_path).of_run(STEPS)
    check_machine(spec)
    job = VerifyJob(model_ref, spec_path, steps, remove_collective, tolerance)
    own, untouched = _planned(job, spec)
    decided = own.plan
    check_stages(decided)
    if weights := pretrained_directory(model_ref):
        check_pretrained(decided, weights)
    world_size = decided.mesh.world_size
    if world_size == 1:
        return verify_rank(job, (own, untouched))
    assert own.model is not None
    untouched.check(own.model)
    with shared(decided) as file:
        del own, decided  # and its model: each rank builds its own
        return _launched(replace(job, planned=file), world_size, timeout_seconds)


def _launched(job: VerifyJob, world_size: int, timeout_seconds: float) -> VerifyReport:
    try:
        return launch(verify_rank, world_size, job, timeout_seconds=timeout_seconds)[0]
    except RankError as error:
        if job.remove_collective is None:
            raise
        return VerifyReport((), failure=_last_error(str(error)))


def _last_error(text: str) -> str:
    """Return the last line of a traceback that is not indented: the error."""
    return [line for line in text.splitlines() if line.strip() and not line[0].isspace()][-1]


def verify_rank(job: VerifyJob, own: tuple[Planned, Untouched] | None = None) -> VerifyReport:
    """Run one rank; rank 0 also runs the one process and compares. Reports of other ranks are empty.
    ``own``: the plan, if this process made it."""
    spec = Spec.load(job.spec).of_run(STEPS)
    of_rank, untouched = own or _planned(job, spec)
    decided, model = of_rank.plan, of_rank.model
    assert model is not None
    notes = batch_notes(decided.decisions) if decided.decisions is not None else ()
    warned = tuple(note.what for note in notes if note.level == "warning")
    num_steps = max(job.num_steps, len(decided.of_all_lengths), BATCHES_IF_WARNED if warned else 0)
    batches = [random_batch(spec, decided, seed, is_uneven=bool(warned)) for seed in range(num_steps)]
    alone: list[OneProcess] = []

    def make() -> Beside:
        untouched.check(model)
        # if the engine loads slices of files, the one process loads all, by transformers unless they are quantized
        alone.append(one_process(with_values(model, job.model, decided, spec), spec, decided))
        return Beside(alone[0], job.tolerance)

    number, rank = job.remove_collective, int(os.environ.get("RANK", "0"))
    program = None if number is None else without_collective(decided, rank, number)
    beside = run_beside(decided, batches, make, program=program, weights=pretrained_directory(job.model))
    if beside is None:
        return VerifyReport(())
    precision = str(beside.precision).removeprefix("torch.")
    notes = [
        *_note_of_dropout(alone[0].model, alone[0].draws, in_its_dtype(batches[-1], spec)),
        f"tolerances for {precision}, the lowest precision in the computation of the model",
    ]
    if beside.imbalance is not None:
        notes.append(f"experts: the fullest rank of ep had {beside.imbalance:.2f} times the mean of rows")
    return VerifyReport(tuple(beside.rows), tuple(notes), warned)


def one_process(model: nn.Module, spec: Spec, decided: Plan) -> OneProcess:
    """Return the one process of ``model`` itself, with the random numbers of the plan if they are layout-invariant."""
    is_mapped = spec.dropout == "layout_invariant"
    draws = NamedDraws(model, draws_of_lengths(model, spec), spec.seed) if is_mapped else None
    return OneProcess(model, spec, draws, decided.parameters, ignored_apart(decided))


def in_mode(model: nn.Module, spec: Spec) -> nn.Module:
    """Set the mode of the comparison: training (with dropout) if random numbers are layout-invariant."""
    return model.train(spec.dropout == "layout_invariant")


def _note_of_dropout(model: nn.Module, draws: NamedDraws | None, batch: dict[str, Tensor]) -> list[str]:
    if draws is not None:
        number = max(map(len, draws.draws.values()))
        return [f"dropout is on: one process uses the same mapped random numbers, {number} draws per forward"]
    if not _draws_in_training(model, {name: rows[:1] for name, rows in batch.items()}):
        return []
    return [
        "dropout is off (model.eval()), because its masks depend on the order of draws; dropout: "
        "layout_invariant removes this and turns it on"
    ]


def _draws_in_training(model: nn.Module, batch: dict[str, Tensor]) -> bool:
    """Return whether a forward in training draws random numbers, or fails; changes the model's mode."""
    before = torch.get_rng_state()
    try:
        with torch.no_grad(), in_eager_mode():
            model.train()(**batch)
    except Exception:
        return True
    return not torch.equal(before, torch.get_rng_state())


def run_beside(
    decided: Plan,
    batches: list[dict[str, Tensor]],
    make: Callable[[], Beside],
    *,
    program: RankProgram | None = None,
    weights: Path | None = None,
    look: Callable[[Engine], object] | None = None,
    is_local: bool = False,
) -> Beside | None:
    """Run each step by the plan, then in one process on rank 0, and compare; return the comparison on rank 0.

    ``make``: makes the one process, after the first update. ``program``: replaces the plan's program of this rank.
    ``weights``: a directory that the engine loads first. ``look``: called before each step and after the last; graphs
    are then captured by the spec's warm-up steps, not at once. ``is_local``: the engine gets only the rows of its dp
    rank.
    """
    rank, beside = int(os.environ.get("RANK", "0")), None
    with Engine(decided, program=program) as engine:
        if weights is not None:
            engine.load_pretrained(weights)
        if engine.graphs is not None and look is None:
            engine.capture_graphs()
        for batch in batches:
            if look is not None:
                look(engine)
            result = _step(engine, batch, is_local)
            with agreed(engine.groups, rank_0_is_long=True):
                if rank == 0:
                    beside = beside or make()
                    beside.step(batch, result)
            del result  # before the next step is gathered
        if look is not None:
            look(engine)
        parameters = engine.gather_parameters()
    if beside is not None:
        beside.compare_parameters(parameters)
    return beside


def _step(engine: Engine, batch: dict[str, Tensor], is_local: bool) -> EngineStep:
    layout, rows_of_rank = engine.layout, batch
    if is_local:
        rows_of_rank = {name: rows.chunk(layout.dp)[layout.dp_rank] for name, rows in batch.items()}
    loss = engine.forward_backward(rows_of_rank, local=is_local)
    before = engine.gather_parameters() if engine.step_index else {}
    gradients = engine.gather_gradients()
    report = engine.optimizer_step()
    imbalance = report.imbalance_of_ranks(engine.plan.mesh.ep) if report.expert_tokens else None
    return EngineStep(loss, report.grad_norm, gradients, before, imbalance)


def _summary(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.severity)
    good = f"{sum(row.passed for row in rows)} of {len(rows)} equal"
    return f"{good}, largest difference {worst.difference:.1e} ({worst.place}), allowed {worst.allowed:.1e}"
