"""The Engine: a plan, running. It opens the groups, fills this rank's stage modules and steps them; it decides nothing.

train_step = batch check -> loss denominators of the global batch -> actions of the schedule -> ZeRO-1 update

Its parts make the calls that are no steps; they share ``running``: the plan on this rank, and how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor

from passes.base import RankProgram
from passes.errors import PlanError
from planner.frozen_plan import Plan
from runtime.audit.audit import Audit, Sample
from runtime.compiled.functions import first_calls
from runtime.data.batches import num_tokens
from runtime.distributed.faults.activity import BATCH, BETWEEN, DENOMINATORS, FORWARD, GRADIENTS, SEARCH, UPDATE
from runtime.distributed.faults.faults import shared_call
from runtime.distributed.groups import RankMesh
from runtime.engine.build import Mode, Running, build, check_mode, errors_of_file, need_training, open_rank, spec_of
from runtime.engine.find_nonfinite import find_nonfinite
from runtime.engine.generation import EngineGeneration
from runtime.engine.length_variants import Variant, Variants
from runtime.engine.log_probs import EngineOutsideLoss, LossFunction, LossOutside
from runtime.engine.saves import EngineSaves
from runtime.engine.stream import EngineStream
from runtime.engine.update import Update
from runtime.engine.weights import EngineWeights
from runtime.pipeline.executor import Step
from runtime.pipeline.nonfinite import NonFinite
from runtime.report.step_report import StepClock, StepReport
from runtime.weights.sources import weight_source

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class by(Generic[Arguments, Result]):
    """A method of the engine that calls that of its ``part``."""

    def __init__(self, part: str, method: Callable[Concatenate[Any, Arguments], Result]) -> None:
        self._part, self._method = part, method
        update_wrapper(self, method)

    def __get__(self, engine: Engine | None, owner: type[Engine]) -> Callable[Arguments, Result]:
        return cast(Any, self if engine is None else partial(self, engine))

    def __call__(self, engine: Engine, *args: Any, **options: Any) -> Result:
        return self._method(getattr(engine, self._part), *args, **options)


class Engine:
    """One rank of a running plan.

    Owns: the process groups that it made, the stage modules and their weights, the optimizer, and the count of steps.
    ``mesh`` has the sizes of the axes and this rank's coordinates: use ``mesh.dp_rank`` and ``mesh.dp_size`` for your
    own DistributedSampler.
    """

    gather_parameters = by("weights", EngineWeights.gather_parameters)
    gather_gradients = by("weights", EngineWeights.gather_gradients)
    load_pretrained = by("weights", EngineWeights.load_pretrained)
    load_adapters = by("weights", EngineWeights.load_adapters)
    averaged_weights = by("weights", EngineWeights.averaged_weights)
    save = by("saves", EngineSaves.save)
    wait_saves = by("saves", EngineSaves.wait_saves)
    load = by("saves", EngineSaves.load)
    save_pretrained = by("saves", EngineSaves.save_pretrained)
    save_merged = by("saves", EngineSaves.save_merged)
    save_adapters = by("saves", EngineSaves.save_adapters)
    stream_weights = by("stream", EngineStream.stream_weights)
    evaluate = by("generation", EngineGeneration.evaluate)
    score = by("generation", EngineGeneration.score)
    scoring_executor = by("generation", EngineGeneration.scoring_executor)
    log_probs = by("generation", EngineGeneration.log_probs)
    generate = by("generation", EngineGeneration.generate)
    kept_bytes = by("generation", EngineGeneration.kept_bytes)

    def __init__(
        self,
        plan: Plan,
        *,
        mode: Mode = "train",
        program: RankProgram | None = None,
        device: torch.device | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Call it on all ranks; a single rank needs no launcher.

        ``mode="evaluate"``: no gradients and no optimizer state; calls that train raise PlanError. ``program``:
        lowered modules to run in place of ``lower(plan, rank)``. Raises PlanError on every rank if the launched world
        does not match the plan, or plans or versions differ between ranks.
        """
        check_mode(mode)
        self.plan, self.mode = plan, mode
        with errors_of_file(plan.model):
            self.spec = spec_of(plan)
            source = weight_source(plan, self.spec)  # first: a plan without a model ends here, before any group
            self.groups = open_rank(plan, device, timeout_seconds)
        self.mesh = RankMesh.of(plan.mesh, self.groups.rank)
        try:
            is_audited = self.spec.audit.every and mode == "train"
            self._audit = Audit(plan, self.spec, self.groups) if is_audited else None
            with errors_of_file(plan.model):
                built = build(plan, self.spec, self.groups, source, program, mode)
        except BaseException as error:
            raised = self.groups.faults.told_as_it_is(error)
            self.groups.abort()
            raise raised from raised.__cause__
        self.running = running = Running(self.spec, built)
        self.program, self.layout, self.compiled = built.program, built.layout, built.compiled
        self.optimizer, self.loss_scale = built.optimizer, running.loss_scale
        self._activity = self.groups.faults.activity
        self._variants = Variants(built, self._before_backward)
        self._now = self._variants.longest
        self.executor, self.graphs = self._now.executor, self._now.graphs
        self._updates = Update(running, self.executor.transport.waits)
        self.weights = EngineWeights(running, source, built.fresh)
        self.saves = EngineSaves(running, self.weights)
        self.saver = self.saves.saver
        self.stream = EngineStream(running, self.weights)
        self.outside_loss = EngineOutsideLoss(running, self.layout)
        self.generation = EngineGeneration(running, self.weights, self._variants, self._step)
        self._activity.begin(BETWEEN, 0)

    @property
    def step_index(self) -> int:
        """Number of updates, with those before a save that was loaded."""
        return self.running.step_index

    # ---- public: steps

    def train_step(
        self, batch: Mapping[str, Tensor], *, local: bool = False, loss: LossFunction | None = None
    ) -> StepReport:
        """Run forward, backward and update on the global batch, the same on every rank; return the report.

        ``local``: the batch has only the rows of this dp rank, as from a DistributedSampler. ``loss``: a function in
        place of the model's own loss, as in ``forward_backward``. Raises PlanError for a batch that does not fit the
        plan, StepError if a stage fails, AuditError before a step if its audit fails.
        On a GPU it returns before the device is done: the first read of a figure in the report waits for it.
        """
        need_training(self.mode, "train_step")
        self.weights.need_own("train_step")
        batch = self.layout.in_rows(batch)
        if self._audit is not None and self._audit.is_due(self.step_index):
            self._audit.judge(self.step_index, *self._audited(self._audit, self.layout.planned(batch), local))
        return self._train_step(batch, local, loss)

    @shared_call(BATCH)
    def _train_step(self, batch: Mapping[str, Tensor], local: bool, function: LossFunction | None) -> StepReport:
        clock = StepClock(self.groups.device)
        batch, outside = self.outside_loss.of(batch, function)
        loss = self._forward_backward(batch, local, outside)
        clock.num_tokens = num_tokens(batch) * (self.mesh.dp if local else 1)
        return self._update(loss, clock)

    @shared_call(BATCH)
    def forward_backward(
        self, batch: Mapping[str, Tensor], *, local: bool = False, loss: LossFunction | None = None
    ) -> float:
        """Return the loss of the global batch. Its gradients replace those of an earlier call and stay for
        ``gather_gradients`` and ``optimizer_step``.

        ``loss(log_probs, rows)``: a function in place of the model's own loss. It is called once per microbatch, with
        log P of its labels [micro, length] (float64; 0 at places without a target) and its rows of ``batch``, which may
        have further tensors, and returns a scalar. The loss is the sum of these values over the global batch.
        """
        need_training(self.mode, "forward_backward")
        self.weights.need_own("forward_backward")
        batch = self.layout.in_rows(batch)
        batch, outside = self.outside_loss.of(batch, loss)
        self._loss = self._forward_backward(batch, local, outside)
        self._activity.off(GRADIENTS)
        self.optimizer.reduce_gradients()
        self.running.gradients_ready = True
        return self.running.over_world(self._loss)

    def set_learning_rate(self, lr: float | None) -> None:
        """Use ``lr`` in place of the schedule's rate from the next update on; None: the schedule. All ranks must call
        it. It is not saved: set it again after ``load``.
        """
        need_training(self.mode, "set_learning_rate")
        self._updates.rate.fixed = lr

    @shared_call(UPDATE)
    def optimizer_step(self) -> StepReport:
        """Clip and update with the gradients of ``forward_backward``. ``tokens_per_s`` is 0: it spans no batch."""
        need_training(self.mode, "optimizer_step")
        self.weights.need_own("optimizer_step")
        if not self.running.gradients_ready:
            raise PlanError("there are no gradients for an update", fix="call forward_backward(batch) first")
        return self._update(self._loss)

    @shared_call(SEARCH)
    def find_nonfinite(
        self, batch: Mapping[str, Tensor], *, local: bool = False, step: int | None = None
    ) -> NonFinite | None:
        """Return the first NaN or Inf of a step: the op that computed it, its rank and its microbatch; None: finite.

        Call it on all ranks, after a report that says ``skipped``, with that step's batch: forward and backward run
        again, every value is checked, and nothing is updated. ``step``: its index; None: the last one. All ranks get
        the same result. Gradients of ``forward_backward`` are lost.
        """
        need_training(self.mode, "find_nonfinite")
        index = max(0, self.step_index - 1) if step is None else step
        self.weights.ready()
        self.running.gradients_ready = False
        batch = self.layout.in_rows(batch)
        variant = self._turn_to(batch, local)
        repeated = replace(self._step(variant, batch, local), index=index, scale=self.loss_scale.before)
        variant.count_sums(repeated, training=True)
        before = self.optimizer.buffers.unmixed.bad(self.step_index - 1 - index)
        self.optimizer.begin_step()
        self._note_load(True)
        try:
            with self.program.weight_gradients.by_autograd(), self.optimizer.buffers.weights.hold():
                return find_nonfinite(variant.executor, repeated, self.groups, self.optimizer, before)
        finally:
            self._note_load(False)

    def place_of(self, batch: Mapping[str, Tensor]) -> int:
        """Return the index of a batch's length in ``plan.lengths``; 0 if the plan has one length."""
        return self._variants.place_of(self.layout.in_rows(batch))

    def capture_graphs(self) -> None:
        """Capture the plan's graphs before the next step: ahead of ``warmup_steps``, or again."""
        need_training(self.mode, "capture_graphs")
        if self.graphs is None:
            raise PlanError("the plan has no regions for CUDA graphs", where="cuda_graphs", fix="set impl: emulate")
        self.graphs.is_wanted = True

    # ---- public: life

    @shared_call("close")
    def close(self) -> None:
        """Wait for saves and for all ranks, then end the process groups that this engine made. May be called again.

        Raises PlanError on every rank if a save in the background failed.
        """
        try:
            self.saver.wait()
        finally:
            if self.groups.world is not None:
                self.optimizer.wait_parameters()
                self.groups.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self.groups.world is not None:
            self.groups.faults.publish(error or kind())
            self.groups.abort()  # waits for no rank: the others may have failed elsewhere

    # ---- pieces of a step

    def _forward_backward(self, batch: Mapping[str, Tensor], local: bool, outside: LossOutside | None) -> Tensor:
        variant = self._turn_to(batch, local, outside=outside is not None)
        step = self._step(variant, batch, local)
        with self.outside_loss.around(variant.executor, variant.layout, outside, batch, local=local):
            self.running.gradients_ready = False
            self._activity.off(FORWARD)
            if variant.program.sums is not None:
                self.weights.ready()
                variant.count_sums(step, training=True)
            self._capture_graphs(variant, step)
            is_whole = variant.graphs is not None and variant.graphs.holds_reductions
            gates = self.program.gate is not None and not is_whole  # one graph for all has none
            self.weights.initialise() if gates else self.weights.ready()
            self.program.weight_gradients.forget()  # of a step that failed
            self.optimizer.begin_step()  # after a capture: its gradients are none of this step
            self._note_load(True)
            run = variant.executor.run if variant.graphs is None else partial(variant.graphs.run_step, variant.executor)
            with first_calls(variant.built.compiled, self.groups):
                loss = self.running.addend_of(run(step))
            self._note_load(False)
        return loss

    @shared_call("audit")
    def _audited(self, audit: Audit, batch: Mapping[str, Tensor], local: bool) -> tuple[Sample, float, float, float]:
        """Return one microbatch, its loss by the engine and by the user's module, and the allowed difference."""
        variant = self._variants.of(batch, local=local)
        variant.intake.check(batch, local=local)
        sample = audit.sample(batch, variant.layout, self.step_index, local=local)
        loss = self.generation.loss_of(sample.repeated, local=False)
        audit.check_memory()
        buffers = self.running.weights.kept.buffers
        return sample, loss, *audit.compare(sample, variant.layout, loss, self.gather_parameters(), buffers)

    def _note_load(self, begins: bool) -> None:
        if (load := self._now.program.load) is not None:
            load.begin(self.groups.device) if begins else load.end()

    def _capture_graphs(self, variant: Variant, step: Step) -> None:
        graphs = variant.graphs
        is_due = graphs is not None and not graphs.is_on and self.step_index >= self.spec.cuda_graphs.warmup_steps
        if graphs is not None and (is_due or graphs.is_wanted):
            self.weights.ready()
            self._note_load(True)  # allocates the memory in which the graphs count
            graphs.capture(variant.executor, step)

    def _turn_to(self, batch: Mapping[str, Tensor], local: bool, *, outside: bool = False) -> Variant:
        """Return the stages for a step of ``batch``; if they change, gradients of an earlier step are lost."""
        variant = self._variants.of(batch, local=local)
        if outside and variant.outside is None:  # before the first step: whether each label is predicted once
            self.weights.ready()
            variant.scoring.score(self._step(variant, batch, local))
        variant = self._variants.outside(variant) if outside else variant
        self.optimizer.turn_to(of_own_loss=not outside)
        if variant is not self._now:
            self._now, self.running.gradients_ready = variant, False
            self.optimizer.buffers.expect(variant.contributions)
            self._updates.turn_to(variant.program, variant.built.plan.to_run()[0])
        return variant

    def _step(
        self, variant: Variant, batch: Mapping[str, Tensor], local: bool, counts: Sequence[Tensor] | None = None
    ) -> Step:
        variant.intake.check(batch, local=local)
        self._updates.take(batch, is_local=local)
        self._activity.off(DENOMINATORS)
        return variant.intake.step(batch, self.step_index, self.loss_scale.tensor, local=local, counts=counts)

    def _before_backward(self, is_last: bool) -> None:
        graphs = self._now.graphs
        self.optimizer.buffers.last_microbatch = is_last and not (graphs and graphs.holds_reductions)

    def _update(self, loss: Tensor, clock: StepClock | None = None) -> StepReport:
        if not self.running.gradients_ready:
            self._activity.off(GRADIENTS)
            self.optimizer.reduce_gradients()
        self._activity.off(UPDATE)
        report = self._updates.run(self.step_index, loss, clock)
        self.running.step_index += 1
        self.running.gradients_ready = False
        return report
