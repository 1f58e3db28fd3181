"""The torch.distributed calls of a rank in some steps: kind, axis and bytes of each, and how often it was called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from passes.ops import collectives, experts
from passes.ops.axis import ALL_GATHER, REDUCE_SCATTER
from planner import Plan
from runtime.distributed import opening
from runtime.distributed.groups import Groups
from runtime.distributed.opening import Communicator
from runtime.engine.engine import Engine
from runtime.optimizer import buffers, whole_weights, zero1
from tests.tools.limits import HANG_SECONDS

STEPS = 2
AXES = ("tp", "cp", "dp", "dp-cp", "pp", "world", "ep", "etp", "edp", "shard", "replica")
OTHERS = ("broadcast", "reduce", "scatter", "gather", "all_to_all", "reduce_scatter", "all_gather_object", "barrier")


class Calls:
    """Wraps what the runtime calls of torch.distributed. Owns: (kind, axis, bytes) → how often, while it is open.

    Rows that go to experts and back are as many bytes as this rank sends, or gets back: what else comes or goes follows
    the routing of others.
    """

    def __init__(self, engine: Engine) -> None:
        groups = engine.groups
        axes = {axis: groups.over(axis) for axis in AXES}
        self.axis_of = {id(group): axis for axis, group in axes.items() if group is not None}
        assert len(self.axis_of) == sum(group is not None for group in axes.values()), "a group of two axes"
        self.axis_of |= {id(group): "embedding" for name, group in groups.by_name.items() if type(name) is tuple}
        shared = [bucket.shared_by for buffer in engine.optimizer.buffers.buffers for bucket in buffer.buckets]
        for by in shared:  # gathers of weights have a group of their own over the same ranks
            self.axis_of.setdefault(id(by.of_weights), self.axis_of.get(id(by.group), "?"))
        self.seen: Counter[tuple[str, str, int]] = Counter()
        self._own_rows = 1
        self._is_inside = False  # what a counted call calls in turn is the same exchange

    def __enter__(self) -> Calls:
        self.patch = pytest.MonkeyPatch()
        names = {"all_reduce": 0, "isend": 0, "irecv": 0, ALL_GATHER: 0, REDUCE_SCATTER: 1, "all_gather": 0}
        kinds = {"isend": "send", "irecv": "recv", ALL_GATHER: "all_gather", REDUCE_SCATTER: "reduce_scatter"}
        for name, position in names.items():
            self._wrap(dist, name, kinds.get(name, name), position)
        for name in OTHERS:  # no row of a plan is of these
            self._wrap(dist, name, f"{name}, in no plan", 0)
        self._wrap(dist, "all_to_all_single", "all_to_all", None)
        for name, position in {"_send": 1, "_return": 0}.items():
            self._turn(name, position)
        self._wrap(collectives, "gather_runs", "all_gather", 0)
        self._wrap(collectives, "scatter_runs", "reduce_scatter", 1)
        self._wrap(buffers, "reduce_scatter", "reduce_scatter", 1)
        self._wrap(buffers, "all_gather", "all_gather", 0)
        self._wrap(zero1, "all_gather", "all_gather", 0)
        self._wrap(whole_weights, "reduce_scatter", "reduce_scatter", 1)
        self._wrap(whole_weights, "all_gather", "all_gather", 0)
        return self

    def _turn(self, name: str, position: int) -> None:
        """Where the own rows are in an all-to-all that ``name`` of the ops calls: given it, or what it gives."""
        real = getattr(experts, name)

        def call(*args: Any) -> Any:
            self._own_rows = position
            return real(*args)

        self.patch.setattr(experts, name, call)

    def __exit__(self, *_: object) -> None:
        self.patch.undo()

    def _wrap(self, module: Any, name: str, kind: str, position: int | None) -> None:
        """Count calls by the bytes of the argument that holds the whole tensor (None: this rank's own rows)."""
        real = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return real(*args, **kwargs)
            given = args[self._own_rows if position is None else position] if args else []
            tensors = given if isinstance(given, list) else [given]
            size = sum(t.numel() * t.element_size() for t in tensors)
            self.seen[kind, self.axis_of.get(id(kwargs.get("group")), "?"), size] += 1
            self._is_inside = True
            try:
                return real(*args, **kwargs)
            finally:
                self._is_inside = False

        self.patch.setattr(module, name, call)


def run_counted(made: Plan) -> dict[str, Any]:
    """Of this rank: the calls of ``STEPS`` steps, its collectives in graphs by phase, the bytes of its buffers."""
    make = opening.make

    def make_own(groups: Groups, ordered: Iterable[Communicator]) -> None:
        """Also where a run shares that of tp or dp with experts: calls tell their axis."""
        for each in ordered:
            make(groups, [each])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make", make_own)
        return counted(made)


def counted(made: Plan) -> dict[str, Any]:
    with Engine(made, timeout_seconds=HANG_SECONDS) as engine:
        batch = batch_of(made)
        engine.train_step(batch)
        axes = engine.program.axes
        for axis in axes.values():
            axis.counts.clear()
            axis.bytes.clear()
        with Calls(engine) as calls:
            for _ in range(STEPS):
                engine.train_step(batch)
                engine.optimizer.wait_parameters()
        return {
            "calls": calls.seen,
            "counts": {name: axis.counts for name, axis in axes.items()},
            "bytes": {name: axis.bytes for name, axis in axes.items()},
            "memory": engine.optimizer.measured_bytes(),
        }


def batch_of(made: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch = made.spec["batch"]
    return {
        name: torch.randint(0, given["high"], (batch["global"], *given["shape"]), generator=generator)
        for name, given in made.spec["inputs"].items()
    }
