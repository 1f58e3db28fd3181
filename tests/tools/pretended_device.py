"""A device that this machine does not have: any rank of any plan runs on it, without values and without peers.

    tensors        torch's FakeTensorMode: shape, dtype and device, no memory. Mixing devices raises, as on a GPU; so
                   does asking for a value, which nobody has
    the device     "gpu:0", torch's PrivateUse1: a fake "cuda" has no backward where torch sees no CUDA
    the peers      torch's fake process group: a rank of any world, whose collectives return at once

The backend is registered once and for good, and autograd starts a thread for it: so all this runs in a process of its
own (``Elsewhere``). Not shown here: which numbers are drawn, since Python cannot make a generator for PrivateUse1 and
draws take one of the host; how ranks meet and compare their weights, as there is one; what asks for "cuda" by name.
"""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from passes.base import RankProgram
from passes.ops.random_state import RandomState
from planner.frozen_plan import Plan
from planner.lower import lower
from runtime import Engine
from runtime.distributed.groups import Groups
from runtime.distributed.opening import communicators, make
from runtime.engine.batch_prep import Intake
from runtime.optimizer import zero1
from tests.tools.host_watch import HostWatch, Sight
from tests.tools.limits import HANG_SECONDS

BACKEND = "cpu:fake,gpu:fake"


class ElsewhereError(RuntimeError):
    """A function failed in the process with the device; the message holds its traceback."""


class Elsewhere:
    """A process with the device, for functions that stand at the top of a module. Owns it."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), register)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The result of ``function(*args)`` there. Raises ElsewhereError with its error, which may not be pickled."""
        result, error = self._pool.submit(_outcome, function, args).result(HANG_SECONDS)
        if error:
            raise ElsewhereError(error)
        return result

    def close(self) -> None:
        self._pool.shutdown()


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, str]:
    try:
        return function(*args), ""
    except Exception:
        return None, traceback.format_exc()


def register() -> None:
    """Give this process the device."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    torch.set_num_threads(1)
    _setup_privateuseone_for_python_backend("gpu")


class HostDraws(RandomState):
    """Draws with a generator of the host: which numbers it gives does not matter where there are no values."""

    def generator(self, device: torch.device, op: int, sharded: bool) -> torch.Generator:
        return torch.default_generator

    def as_default(self, device: torch.device, op: int, sharded: bool) -> Any:
        return nullcontext()


class PretendedMode(FakeTensorMode):
    """Fake tensors, though a real one goes to the device: torch would ask that device for its copy, as a constant."""

    avoid_device_init: Any = property(lambda _: True, lambda *_: None)


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` among real tensors of the host: what is found out while an engine is built may depend on values."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


class PretendedIntake(Intake):
    """It may look at its batch, the only tensors that have values; nobody else has one to compare it with."""

    def check(self, batch: Mapping[str, Tensor], *, local: bool) -> None:
        with_values(self._built.layout.check)(batch, local=local)


class Findings(NamedTuple):
    """What a rank's step showed. ``misplaced``: tensors that do not lie on the device, by name."""

    sights: list[Sight]
    misplaced: list[str]
    num_ops: int


def lowered(plan: Plan, rank: int, device: torch.device) -> RankProgram:
    """The rank's program for the device, drawing with ``HostDraws``."""
    program = lower(plan, rank, device)
    program.random = HostDraws(program.random.seed, program.random.tp_rank)
    for stage in program.stages:
        if hasattr(stage.module, "random"):
            stage.module.random = program.random  # type: ignore[assignment]
    return program


@contextmanager
def opened(plan: Plan, rank: int, device: torch.device) -> Iterator[Groups]:
    """The process groups of one rank, those of NCCL's layout, with nobody at their other ends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mesh = plan.mesh
    groups = Groups(mesh, rank, device, timedelta(seconds=HANG_SECONDS))
    if mesh.world_size > 1:
        dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=mesh.world_size)
        groups.world = groups.host = dist.group.WORLD
        groups.owns_default, groups.backend = True, BACKEND
        tied = sorted({tuple(p.stages) for p in plan.parameters if len(p.stages) > 1})
        make(groups, communicators(mesh, tied)[1:])
    try:
        yield groups
    finally:
        if groups.world is not None:
            groups.destroy()


def step_on_device(plan: Plan, rank: int, batch: dict[str, Tensor]) -> Findings:
    """Build the rank's engine on the device and take two steps; the second one is watched."""
    device = torch.device("gpu", 0)
    with opened(plan, rank, device) as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.engine.engine.open_rank", lambda *_: groups)  # there is nobody to meet
        patch.setattr("runtime.engine.length_variants.Intake", PretendedIntake)
        patch.setattr("runtime.engine.build.differing", lambda *_: [])  # nor to compare weights with
        patch.setattr("runtime.engine.build.require_same_code", lambda *_, **__: None)  # nor code
        patch.setattr(zero1, "whole_indices", with_values(zero1.whole_indices))
        with PretendedMode(allow_non_fake_inputs=True):
            program = lowered(plan, rank, device)
            engine = Engine(plan, program=program)
            engine.train_step(batch)
            with HostWatch(program, on_device=True) as watch:
                report = engine.train_step(batch)
            held = tensors_of(engine) | {"the figures of the report": report._figures._values}
    return Findings(watch.sights, [name for name, tensor in held.items() if tensor.device != device], watch.num_ops)


def tensors_of(engine: Engine) -> dict[str, Tensor]:
    """All that a rank holds between steps."""
    held: dict[str, Tensor] = {}
    for stage in engine.program.stages:
        named = (*stage.module.named_parameters(), *stage.module.named_buffers())
        held |= {f"stage {stage.index}: {name}": tensor for name, tensor in named}
    for i, shard in enumerate(engine.optimizer.shards):
        parts = {"main": shard.main, "gradient": shard.grad, "bucket": shard.bucket.parameters, "whole": shard.whole}
        held |= {f"shard {i}: {name}": tensor for name, tensor in parts.items() if tensor is not None}
    if engine.optimizer.optimizer is not None:
        for i, state in enumerate(engine.optimizer.optimizer.state.values()):
            held |= {f"state {i}: {name}": value for name, value in state.items() if isinstance(value, Tensor)}
    return held
