"""The Engine: a plan, running. It opens the groups, fills this rank's stage modules and steps them; it decides nothing.

train_step = batch check -> loss denominators of the global batch -> actions of the schedule -> ZeRO-1 update
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from passes.stage_module import RankProgram
from planner.errors import PlanError
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.build import build, executor_of, graphs_of, open_rank, parameters_of
from runtime.checkpoint.pretrained_load import load_pretrained
from runtime.checkpoint.pretrained_save import MAX_SHARD_BYTES, save_pretrained
from runtime.data.batches import num_tokens
from runtime.data.denominators import denominators
from runtime.data.first_batch import check_first_batch, tell_failure
from runtime.distributed.groups import RankMesh
from runtime.optimizer.loss_scale import LossScale
from runtime.optimizer.lr import learning_rate
from runtime.pipeline.executor import Step
from runtime.report.step_report import StepClock, StepReport
from runtime.weights.gather import collect, from_rank_0
from runtime.weights.shards import initialise
from runtime.weights.sources import weight_source

_engines_made = 0


class Engine:
    """One rank of a running plan.

    Owns: the process groups that it made, the stage modules and their weights, the optimizer, and the count of steps.
    ``mesh`` tells the sizes of the axes and this rank's place on them: ``mesh.dp_rank`` and ``mesh.dp_size`` are for a
    user's own DistributedSampler.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        program: RankProgram | None = None,
        device: torch.device | str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        """The same call on every rank; a rank alone needs no launcher.

        ``program``: lowered modules to run in place of ``lower(plan, rank)``. Raises PlanError, on every rank, when the
        launched world is not the plan's, or plans or versions differ between ranks.
        """
        self.plan = plan
        self._decisions, self._shards = plan.to_run()
        self.spec = Spec.load({**plan.spec, "cluster": None})  # the file was read when planning, and may lie elsewhere
        self.step_index = 0
        self._gradients_ready = False
        self._weights = weight_source(plan, self.spec)  # first: a plan without a model ends here, before any group
        self.groups, self._store = open_rank(plan, device, timeout_seconds)
        self.mesh = RankMesh.of(plan.mesh, self.groups.rank)
        try:
            built = build(plan, self.spec, self.groups, self._weights, program)
        except BaseException as error:
            if self._store is not None:
                tell_failure(self._store, self.mesh.world_size, self.groups.rank, error)
            self.groups.abort()
            raise
        self.program, self.layout, self.optimizer = built.program, built.layout, built.optimizer
        self._fresh, self._kept = built.fresh, built.kept
        self.loss_scale = LossScale(self.spec.precision, self.groups.device)
        self._nothing = torch.zeros((), dtype=torch.float64, device=self.groups.device)
        self.graphs = graphs_of(plan, built, self.spec, self.groups)
        self.executor = executor_of(plan, built, self.groups, self.graphs, before_backward=self._before_backward)

    # ---- public: steps

    def train_step(self, batch: Mapping[str, Tensor], *, local: bool = False) -> StepReport:
        """Forward, backward and update on the global batch, the same on every rank; the loss is its mean.

        ``local``: the batch is this dp rank's own share, as a DistributedSampler deals it. Raises PlanError for a batch
        that is not the plan's, StepError when a stage fails. On a GPU it returns before the device is done: the first
        figure of the report that is read waits for it.
        """
        clock = StepClock(self.groups.device)
        loss = self._forward_backward(batch, local)
        return self._update(loss, num_tokens(batch) * (self.mesh.dp if local else 1), clock)

    def forward_backward(self, batch: Mapping[str, Tensor], *, local: bool = False) -> float:
        """The loss of the global batch; its gradients replace those of an earlier call and are left for
        ``gather_gradients`` and ``optimizer_step``."""
        self._loss = self._forward_backward(batch, local)
        self.optimizer.reduce_gradients()
        self._gradients_ready = True
        return self._over_world(self._loss)

    def optimizer_step(self) -> StepReport:
        """Clip and update with the gradients of ``forward_backward``. ``tokens_per_s`` is 0: it spans no batch."""
        if not self._gradients_ready:
            raise PlanError("there are no gradients to update with", fix="call forward_backward(batch) first")
        return self._update(self._loss)

    def evaluate(self, batch: Mapping[str, Tensor], *, local: bool = False) -> float:
        """The loss of the global batch, without gradients and without dropout."""
        self._ready()
        return self._over_world(self._loss_here(self.executor.evaluate(self._step(batch, local))))

    def capture_graphs(self) -> None:
        """Capture the plan's graphs before the next step: ahead of ``warmup_steps``, or anew."""
        if self.graphs is None:
            raise PlanError("the plan has no regions for CUDA graphs", where="cuda_graphs", fix="set impl: emulate")
        self.graphs.is_wanted = True

    # ---- public: tensors in and out

    def gather_parameters(self) -> dict[str, Tensor]:
        """Full parameters on rank 0 (CPU) under every name that the user's model has for them; ``{}`` elsewhere."""
        self._ready()
        unused = from_rank_0(self.groups, [*self._kept.parameters])
        dtypes = {row.name: getattr(torch, row.dtype) for row in self.plan.parameters if row.name not in unused}
        return self._named({**collect(self.plan.parameters, self._own(), dtypes, self.groups), **self._kept.parameters})

    def gather_gradients(self) -> dict[str, Tensor]:
        """Full gradients on rank 0 (CPU), before clipping, of every trainable parameter; ``{}`` elsewhere.

        After ``forward_backward`` and before ``optimizer_step``. Raises PlanError at other times.
        """
        if not self._gradients_ready:
            raise PlanError(
                "there are no gradients: an update has used them up, or none were made",
                fix="call it between forward_backward(batch) and optimizer_step()",
            )
        gradients = self.optimizer.gather_gradients(grad_scale=self.loss_scale.value)
        dtypes = {name: buffer.main_dtype for buffer in self._shards.buffers for name in buffer.by_name}
        return self._named(collect(self.plan.parameters, gradients, dtypes, self.groups))

    def load_pretrained(self, directory: str | PathLike[str]) -> None:
        """Take the weights of a Hugging Face directory (config.json and safetensors, one file or an index of several).

        Each rank reads only its slices. The same call on every rank, before the first step: the optimizer's moments and
        the count of steps stay as they are. Raises PlanError on every rank, naming file and tensor; then no weight has
        changed.
        """
        self.optimizer.wait_parameters()
        load_pretrained(self.plan, self.program.stages, self.groups, self._kept, directory)
        self._fresh = []
        self._gradients_ready = False
        self.optimizer.sync_main_from_parameters()

    def save_pretrained(self, directory: str | PathLike[str], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write config.json and safetensors that ``transformers`` loads; other files of the directory stay.

        The same call on every rank; rank 0 writes, one tensor at a time. A directory that is there is replaced whole,
        so a run that is killed leaves the old one or the new. Raises PlanError on every rank.
        """
        self._ready()
        save_pretrained(self.plan, self._own(), self.groups, self._kept, directory, max_shard_bytes)

    def save(self, directory: str | PathLike[str]) -> None:
        """Not there yet. Raises PlanError."""
        raise PlanError("checkpoints are not available yet", fix="write gather_parameters() of rank 0 to a file")

    def load(self, directory: str | PathLike[str]) -> None:
        """Not there yet. Raises PlanError."""
        raise PlanError("checkpoints are not available yet", fix="plan a model that holds the weights")

    # ---- public: life

    def close(self) -> None:
        """Wait for all ranks, then end the process groups that this engine made. Calling it again does nothing."""
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
            self.groups.abort()  # nobody is waited for: the other ranks may have failed elsewhere

    # ---- pieces of a step

    def _ready(self) -> None:
        """The parameters as they are to be read: updated by all ranks, and initialised where nothing was loaded."""
        self.optimizer.wait_parameters()
        self._initialise()

    def _initialise(self) -> None:
        if self._fresh:
            initialise(self._fresh, self._weights, self.mesh.tp, self.groups.tp_rank)
            self._fresh = []
            self.optimizer.sync_main_from_parameters()

    def _forward_backward(self, batch: Mapping[str, Tensor], local: bool) -> Tensor:
        step = self._step(batch, local)
        self._gradients_ready = False
        self._capture_graphs(step)
        is_whole = self.graphs is not None and self.graphs.holds_reductions
        gates = self.program.gate is not None and not is_whole  # one graph for all has none
        self._initialise() if gates else self._ready()
        self.optimizer.begin_step()  # after a capture: its gradients are none of this step
        run = self.executor.run if self.graphs is None else partial(self.graphs.run_step, self.executor)
        return self._loss_here(run(step))

    def _capture_graphs(self, step: Step) -> None:
        graphs = self.graphs
        is_due = graphs is not None and not graphs.is_on and self.step_index >= self.spec.cuda_graphs.warmup_steps
        if graphs is not None and (is_due or graphs.is_wanted):
            self._ready()
            graphs.capture(self.executor, step)

    def _step(self, batch: Mapping[str, Tensor], local: bool) -> Step:
        self._check(batch, local)
        read = dict.fromkeys(name for stage in self.program.stages for name in stage.inputs)
        microbatches = self.layout.microbatches(batch, read, self.groups.device, local=local)
        return Step(
            self.step_index,
            microbatches,
            self.layout.first_microbatch,
            denominators(self.program, self.layout, batch, self.groups, local=local),
            self.loss_scale.tensor,
        )

    def _check(self, batch: Mapping[str, Tensor], local: bool) -> None:
        store, self._store = self._store, None
        if store is None:
            self.layout.check(batch, local=local)
        else:
            check_first_batch(
                self.layout, batch, store, self.mesh.world_size, self.groups.rank, self.groups.timeout, local=local
            )

    def _before_backward(self, is_last: bool) -> None:
        self.optimizer.buffers.last_microbatch = is_last and not (self.graphs and self.graphs.holds_reductions)

    def _loss_here(self, loss: Tensor | None) -> Tensor:
        """This rank's addend to the global loss: the tp ranks of the last stage all have it, one adds it."""
        return loss if loss is not None and self.groups.tp_rank == 0 else self._nothing

    def _over_world(self, addend: Tensor) -> float:
        if self.groups.world is None:
            return addend.item()
        total = addend.clone()
        dist.all_reduce(total, group=self.groups.world)
        return total.item()

    def _update(self, loss: Tensor, num_tokens: int = 0, clock: StepClock | None = None) -> StepReport:
        rate, scale = self._learning_rate(), self.loss_scale.tensor
        result = self.optimizer.step(rate, grad_scale=1.0 if scale is None else scale, extra=[loss])
        self.loss_scale.update(result.found_inf)
        self.step_index += 1
        self._gradients_ready = False
        if clock is not None:
            clock.stop()
        return StepReport(result.figures, rate, num_tokens, clock)

    def _learning_rate(self) -> float:
        o, s = self.spec.optimizer, self.spec.optimizer.schedule
        return learning_rate(self.step_index, o.lr, kind=s.kind, warmup=s.warmup, steps=s.steps, min_lr=s.min_lr)

    # ---- tensors by name

    def _own(self) -> dict[str, Tensor]:
        """This rank's shards; of a tied weight's copies any, they are equal."""
        return {p.fqn: parameter.data for p, parameter in parameters_of(self.program)}

    def _named(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the model's order, tied parameters under each of their names."""
        named = {}
        for row in self.plan.parameters:
            if row.name in tensors:
                named.update({name: tensors[row.name] for name in (row.name, *row.aliases)})
        return {**named, **{name: tensor for name, tensor in tensors.items() if name not in named}}
