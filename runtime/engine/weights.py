"""The weights of an engine: gathers them, loads them from files of the Hub, exchanges them for their mean."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from os import PathLike

import torch
from torch import Tensor

from passes.errors import PlanError
from planner.capture.model.meta_init import give_back_freed
from runtime.checkpoint.adapters import adapted_in, load_adapters
from runtime.checkpoint.pretrained_load import load_pretrained
from runtime.distributed.agreement import broadcast_json
from runtime.distributed.faults.faults import shared_call
from runtime.engine.build import Running, need_training, parameters_of
from runtime.optimizer.whole_weights import Opened
from runtime.weights.initial_weights import Fresh
from runtime.weights.shards import OwnParameters, collect, initialise
from runtime.weights.sources import ModelWeights, RecordedWeights


class EngineWeights:
    """The weights. Owns the parameters that still wait for values, and whether weights are exchanged for their mean."""

    def __init__(self, running: Running, source: ModelWeights, fresh: Fresh) -> None:
        """``source``: of initial values."""
        self.running, self._source, self._fresh = running, source, fresh
        self._is_averaged = self._is_exchange_due = False

    @shared_call("gather")
    def gather_parameters(self) -> dict[str, Tensor]:
        """Return full parameters on rank 0 (CPU) under all names in the user's model; ``{}`` elsewhere."""
        rows, groups, kept = self.running.plan.parameters, self.running.groups, self.running.weights.kept
        unused = broadcast_json(groups, [*kept.parameters])
        dtypes = {row.name: getattr(torch, row.dtype) for row in rows if row.name not in unused}
        with self.own() as own:
            return collect(self.running.plan, own, dtypes, groups, kept.parameters)

    @shared_call("gather")
    def gather_gradients(self) -> dict[str, Tensor]:
        """Return full gradients of all trainable parameters on rank 0 (CPU), before clipping; ``{}`` elsewhere.

        Call it between ``forward_backward`` and ``optimizer_step``; raises PlanError at other times.
        """
        running = self.running
        need_training(running.mode, "gather_gradients")
        if not running.gradients_ready:
            raise PlanError(
                "there are no gradients: an update has consumed them, or no backward ran",
                fix="call it between forward_backward(batch) and optimizer_step()",
            )
        gradients = running.optimizer.gather_gradients(grad_scale=running.loss_scale.value)
        shards = running.plan.to_run()[1]
        dtypes = {n: b.main_dtype for n, b in shards.buffer_of(running.plan.mesh.ep).items()}
        return collect(running.plan, gradients, dtypes, running.groups)

    @shared_call("load")
    def load_pretrained(self, directory: str | PathLike[str]) -> None:
        """Load the weights of a Hugging Face directory (config.json and safetensors, one file or an index of several).

        Call it on all ranks, before the first step: the optimizer's moments and the count of steps are kept. Each rank
        reads only its slices. If peft has wrapped the model, the directory is its base's, and adapters keep their
        values. Raises PlanError on every rank, naming file and tensor; then no weight has changed.
        """
        self.need_own("load_pretrained")
        self.running.optimizer.wait_parameters()
        with self._replaced() as opened:

            def rest(found: frozenset[str], read: Callable[[str], Tensor]) -> None:
                opened.close()
                self._take_rest(found, read)

            load_pretrained(self.running.weights, directory, rest, opened)

    @shared_call("load")
    def load_adapters(self, directory: str | PathLike[str]) -> None:
        """Load the adapters that ``save_adapters`` or peft wrote. Each rank reads only its slices.

        Call it on all ranks, before the first step: the optimizer's moments and the count of steps are kept. Raises
        PlanError on every rank, also for adapters of another base or config; then no weight has changed.
        """
        adapted_in(self.running.plan.hub)
        self.need_own("load_adapters")
        self.ready()
        with self._replaced() as opened:
            load_adapters(self.running.weights, directory, opened)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Exchange the weights for their running mean (``optimizer.ema``, or that of a schedule-free rule) inside the
        block, to evaluate, score, gather or ``save_pretrained``; training, saving and loading are refused inside.
        Afterwards the weights are restored bitwise.

        All ranks must call it. Raises PlanError if the spec has no mean.
        """
        need_training(self.running.mode, "averaged_weights")
        if self.running.optimizer.average is None:
            fix = "set optimizer: {ema: 0.999}"
            raise PlanError("the spec has no running mean of the weights", where="optimizer.ema", fix=fix)
        self.need_own("averaged_weights")
        self._exchange_average()
        self._is_averaged = True
        try:
            yield
        except BaseException:  # perhaps on this rank alone: the next call of all ranks restores the weights
            self._is_exchange_due = True
            raise
        else:
            self._exchange_average()
        finally:
            self._is_averaged = False

    # ---- before they are read or replaced

    def need_own(self, name: str) -> None:
        """Raise PlanError, naming the call, inside ``averaged_weights``."""
        self._settle_exchange()
        if self._is_averaged:
            what = f"{name} inside averaged_weights: the weights are replaced by their running mean"
            raise PlanError(what, where="averaged_weights", fix=f"leave the `with` before you call {name}")

    def ready(self) -> None:
        """Make the parameters ready to read: updated by all ranks, and initialised if nothing was loaded."""
        self._settle_exchange()
        self.running.optimizer.wait_parameters()
        self.initialise()

    def initialise(self) -> None:
        """Draw initial values of the parameters that still wait for them."""
        if self._fresh:
            source = self._source
            if isinstance(source, RecordedWeights) and any(source.waits_for_base(p.fqn) for _, p in self._fresh):
                fix = "call load_pretrained(DIR) with its directory"
                raise PlanError("the weights of the base were not read", where="MODEL", fix=fix)
            with self._opened(writes=True) as opened:
                initialise(self._fresh, source, self.running.groups, opened)
            self._fresh = []
            give_back_freed()  # full parameters, of which shards were taken
            self.running.optimizer.sync_main_from_parameters()

    def loaded(self) -> None:
        """Note that all parameters have the values of a save."""
        self._fresh = []

    @contextmanager
    def own(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield this rank's parts of parameters by name, once they are ready; copies of a tied weight are equal."""
        self.ready()
        tensors = {p.fqn: parameter.data for p, parameter in parameters_of(self.running.program)}
        with self._opened() as opened:
            yield OwnParameters(tensors, opened)

    @shared_call("averaged weights")
    def _exchange_average(self) -> None:
        self.ready()
        self.running.gradients_ready = False
        self.running.optimizer.exchange_average()

    def _settle_exchange(self) -> None:
        """Restore the weights if an error ended ``averaged_weights``."""
        if self._is_exchange_due:
            self._is_exchange_due = False
            self._exchange_average()

    def _take_rest(self, found: frozenset[str], read: Callable[[str], Tensor]) -> None:
        """Draw initial values of the parameters that a base's files lack, and those that peft computes from them."""
        source = self._source
        if not isinstance(source, RecordedWeights):
            self._fresh = [held for held in self._fresh if held[1].fqn not in found]
            return
        self._fresh = [
            held
            for held in self._fresh
            if (fqn := held[1].fqn) not in found or (source.waits_for_base(fqn) and not source.is_of_base(fqn))
        ]
        with source.recorded.reading(read):
            self.initialise()

    @contextmanager
    def _replaced(self) -> Iterator[Opened]:
        """Run a block that replaces weights, and copy them to the optimizer afterwards."""
        self.running.optimizer.before_overwriting()
        with self._opened(writes=True) as opened:
            yield opened
        self.running.gradients_ready = False
        self.running.optimizer.sync_main_from_parameters()

    def _opened(self, *, writes: bool = False) -> AbstractContextManager[Opened]:
        """Return a context with a function that gathers a parameter's sharded weights by name, on all ranks together;
        ``writes``: they may be replaced.
        """
        unit_of = self.running.plan.to_run()[1].bucket_of(self.running.groups.place)
        return self.running.optimizer.buffers.weights.one_by_one(unit_of, writes=writes)
