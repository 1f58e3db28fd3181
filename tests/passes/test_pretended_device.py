"""Every rank's engine on a device that this machine does not have: nothing lies elsewhere, the host waits for nothing.

A case is a model and a layout. On a rank of each pipeline rank, by turns another of tp and dp, the engine is built on
the pretended device and takes two steps; between the first forward of the second one and the end of its update no value
is asked for, nothing comes up from the host, and no op computes there. A mix of devices raises by itself.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import passes.dropout
import passes.lower
import runtime.engine.build
from passes.ops.dropout import stream_dropout
from passes.peephole import place_devices
from planner.mesh import Mesh
from runtime.optimizer import zero1
from runtime.optimizer.main_shards import squared_norm
from runtime.optimizer.scalars import LossScale
from runtime.optimizer.zero1 import DistributedOptimizer
from runtime.weights import shards
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.pretended_device import Elsewhere, ElsewhereError, Findings, step_on_device
from tests.tools.specs import entry_inputs

BF16 = {"precision": {"parameters": "bfloat16"}}
FP32 = {"precision": {"parameters": "float32"}}
FP16 = {"precision": {"parameters": "float16", "loss_scale": "dynamic"}}
SEQUENCE = {"tensor_parallel": {"vocabulary_multiple": 8, "sequence_parallel": True}}
INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}


class Case(NamedTuple):
    """``model``: a name of tests.models; one that tells of dropout trains with it."""

    model: str
    mesh: dict[str, int]
    rest: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return "-".join([self.model, *(f"{axis}{size}" for axis, size in self.mesh.items())])


EVERY_TOKEN = {"cuda_graphs": {"impl": "emulate", "scope": ["attn"]}}  # without it rows depend on the routing

CASES = [
    Case("gpt2", {"tp": 2, "pp": 2}, FP32),
    Case("gpt2-dropout", {"tp": 2, "dp": 2}, BF16 | SEQUENCE),
    Case("llama", {"tp": 2, "pp": 2, "vpp": 2}, BF16 | SEQUENCE | INTERLEAVED),
    Case("bert", {"pp": 2, "dp": 2}, BF16),
    Case("t5", {"tp": 2}, FP16),
    Case("gpt-dropout", {"tp": 2, "pp": 2}, FP16 | SEQUENCE),
    Case("own-router", {"tp": 2, "dp": 2}, FP32 | EVERY_TOKEN),
    Case("class-weights-buffer", {"dp": 2}, FP32 | {"optimizer": {"zero": 0}}),
    Case("relative-bias", {"pp": 2}, FP32),
    Case("penalty-loss", {}, BF16),
]
SLOW_CASES = [
    Case("gpt-dropout", {"tp": 2, "pp": 2, "vpp": 2, "dp": 2}, BF16 | SEQUENCE | INTERLEAVED),
    Case("llama-one-key-head", {"tp": 4}, BF16),
    Case("falcon-alibi", {"tp": 2, "pp": 2}, FP32),
    Case("einsum", {"tp": 2, "pp": 2}, FP32 | SEQUENCE),
    Case("state-space", {"tp": 2, "pp": 2}, FP32),
    Case("torch-encoder", {"tp": 2, "pp": 2}, FP32),
    Case("several-losses", {"tp": 2, "pp": 2, "dp": 2}, FP32),
    Case("falcon-7b", {"tp": 2, "dp": 2}, BF16),
]


def _no_placement(patch: pytest.MonkeyPatch) -> None:
    """The pass that gives factories the rank's device is left out."""
    kept = tuple(step for step in passes.lower.PASSES if step.run is not place_devices)
    patch.setattr(passes.lower, "PASSES", kept)


def _item_in_an_op(patch: pytest.MonkeyPatch) -> None:
    """Dropout asks the sum of its input."""

    def asking(x: Tensor, *rest: Any) -> Tensor:
        return stream_dropout(x, *rest) * (1.0 if x.sum().item() else 0.0)

    patch.setattr(passes.dropout.ops, "stream_dropout", asking)


def _mask_as_an_index(patch: pytest.MonkeyPatch) -> None:
    """The norm is of those gradients that are not zero."""
    patch.setattr(zero1, "squared_norm", lambda grad: squared_norm(grad[grad != 0]))


def _buffers_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """The model's buffers stay where they were."""

    def fill(stages: Any, *rest: Any) -> Any:
        fresh = shards.fill(stages, *rest)
        for module in (module for stage in stages for module in stage.module.modules()):
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.cpu()
        return fresh

    patch.setattr(runtime.engine.build, "fill", fill)


def _scale_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """The loss scale lies on the host: a tensor without dims, which torch lets stand among those of a device."""
    patch.setattr(runtime.engine.build, "LossScale", lambda precision, _: LossScale(precision, torch.device("cpu")))


def _number_up(patch: pytest.MonkeyPatch) -> None:
    """The learning rate goes up in each step."""
    update = DistributedOptimizer._update

    def updating(self: Any, lr: float, divisor: Tensor | None, found_inf: Tensor, asked: Tensor | None) -> None:
        update(self, lr, torch.tensor(1.0 / lr, device=self.device) * lr, found_inf, asked)

    patch.setattr(DistributedOptimizer, "_update", updating)


TINY = Case("gpt-dropout", {"tp": 2}, FP32)
MUTANTS: dict[str, tuple[Case, Callable[[pytest.MonkeyPatch], None], str]] = {
    "no placement": (Case("gpt2", {}, FP32), _no_placement, "gpu:0 and cpu"),
    "item in an op": (TINY, _item_in_an_op, "_local_scalar_dense"),
    "mask as an index": (TINY, _mask_as_an_index, "nonzero"),
    "buffers on the host": (Case("class-weights-buffer", {}, FP32), _buffers_on_the_host, "gpu:0 and cpu"),
    "scale on the host": (Case("gpt", {}, FP16), _scale_on_the_host, "found cpu"),
    "number up": (TINY, _number_up, "copy"),
}


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Elsewhere]:
    made = Elsewhere()
    yield made
    made.close()


def run_case(case: Case, mutant: str | None = None) -> list[Findings]:
    """What each rank's step shows, in the process that has the device; of a mutant rank 0's."""
    entry = families.build(case.model)
    if "dropout" in case.model:
        entry.model.train()
    inputs = entry_inputs(entry, bounded=True)
    num_sequences = case.mesh.get("dp", 1) * (4 if "vpp" in case.mesh else 2)
    batch = {"global": num_sequences, "micro": 1}
    spec = {"mesh": case.mesh, "batch": batch, "inputs": inputs, "tensor_parallel": {"vocabulary_multiple": 8}}
    decided = plan_again(entry.model, spec | case.rest)
    ranks = ranks_of(decided.mesh) if mutant is None else [0]
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None:
            MUTANTS[mutant][1](patch)
        return [step_on_device(decided, rank, entry.batch(num_sequences, 0)) for rank in ranks]


def ranks_of(mesh: Mesh) -> list[int]:
    """One of each pipeline rank."""
    return [mesh.rank_of(pp=pp, tp=pp % mesh.tp, dp=pp % mesh.dp) for pp in range(mesh.pp)]


def check(found: list[Findings], pp: int) -> None:
    assert len(found) == pp
    for rank, findings in enumerate(found):
        assert findings.num_ops > 500, f"rank {rank} did not take its step on the device"
        assert not findings.misplaced, f"rank {rank}"
        assert not findings.sights, f"rank {rank}"


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_on_the_device_alone(elsewhere: Elsewhere, case: Case) -> None:
    check(elsewhere.run(run_case, case), case.mesh.get("pp", 1))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_a_step_of_any_family_is_on_the_device_alone(elsewhere: Elsewhere, case: Case) -> None:
    check(elsewhere.run(run_case, case), case.mesh.get("pp", 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_seen(elsewhere: Elsewhere, mutant: str) -> None:
    case, _, seen = MUTANTS[mutant]
    try:
        (found,) = elsewhere.run(run_case, case, mutant)
        shown = f"{found.sights} {found.misplaced}"
    except ElsewhereError as error:  # torch has refused to go on
        shown = str(error).partition("its place in the schedule")[0]
    assert seen in shown
