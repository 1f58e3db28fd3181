"""NaN and infinity: all ranks stop at one step, nothing was updated, and who made the first of them is named."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner import plan
from runtime import Engine
from runtime.pipeline.nonfinite import PARAMETER, NonFinite, Seen, first_of
from runtime.training.loop import NonFiniteError, NonFiniteGuard
from tests.models import families, fragile
from tests.tools.commands import python
from tests.tools.jobs import own_parameters
from tests.tools.laboratory import Case, Lab, spec_of
from tests.tools.limits import HANG_SECONDS

LINES = Path(fragile.__file__).read_text().splitlines()


def line_of(mark: str) -> int:
    return next(n for n, line in enumerate(LINES, 1) if line.endswith(f"# here: {mark}"))


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step: ``batch`` {(input, sequence, layer): value}, or a weight of one tp rank.

    Then what is to be found: phase, op, module or parameter, the mark of its line, microbatch, and the rank within tp.
    """

    name: str
    phase: str
    op: str = ""
    mark: str = ""
    microbatch: int = -1
    value: str = "NaN"
    batch: tuple[tuple[str, int, int, float], ...] = ()
    weight: str = ""
    tp_rank: int = 0
    huge: float = 0.0

    @property
    def stage(self) -> int:
        """Of two; -1 for what belongs to none."""
        return int(self.name.split(".")[1]) // 2 if self.mark else -1


def depth(sequence: int, layer: int) -> tuple[str, int, int, float]:
    return "depths", sequence, layer, -1.0


FAULTS = [
    Fault("layers.2.logarithm", "forward", "aten.log", "log", 2, batch=(depth(5, 2),)),
    Fault("layers.3.logarithm", "forward", "aten.log", "log", 0, batch=(depth(2, 1), depth(0, 3))),
    Fault("layers.1.logarithm", "forward", "aten.log", "log", 3, batch=(depth(6, 3), depth(7, 1))),
    Fault("layers.1.root", "backward", "aten.sqrt", "sqrt", 3, batch=(("slopes", 6, 1, 0.0),), value="NaN|infinity"),
    Fault("slopes", "batch", microbatch=3, batch=(("slopes", 7, 1, float("nan")), depth(0, 0))),
]
WEIGHTS = [
    Fault("layers.3.mlp", "forward", "aten.square", "square", 0, "infinity", (), f"{up}.weight", rank, 1e200)
    for up, rank in (("layers.3.mlp.up", 0), ("layers.3.mlp.up", 1))
] + [Fault("layers.1.mlp.down.weight", "parameter", "", "", -1, "NaN", (), "layers.1.mlp.down.weight", 1, float("nan"))]


def breaking(decided: Any, batches: list[dict[str, Tensor]], faults: list[Fault]) -> list[tuple[Any, ...]]:
    """A good step before each fault: what the guard says, what it found, whether anything was updated."""
    found = []
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        guard = NonFiniteGuard(engine)
        for fault in faults:
            guard.check(batches[0], engine.train_step(batches[0]), engine.step_index - 1)
            assert engine.find_nonfinite(batches[0]) is None
            found.append(_broken(engine, guard, batches[1], fault))
    return found


def _broken(engine: Engine, guard: NonFiniteGuard, good: dict[str, Tensor], fault: Fault) -> tuple[Any, ...]:
    batch = {name: tensor.clone() for name, tensor in good.items()}
    for name, sequence, layer, value in fault.batch:
        batch[name][sequence, layer] = value
    engine.optimizer.wait_parameters()
    own, kept = own_parameters(engine), 0.0
    has_fault = fault.weight in own and engine.groups.place["tp"] == fault.tp_rank
    if has_fault:
        kept = float(own[fault.weight].view(-1)[0])
        own[fault.weight].view(-1)[0] = fault.huge
    before = {name: tensor.clone() for name, tensor in own.items()}
    report, text = engine.train_step(batch), ""
    try:
        guard.check(batch, report, engine.step_index - 1)
    except NonFiniteError as error:
        text = str(error)
    engine.optimizer.wait_parameters()
    same = all(torch.equal(tensor.nan_to_num(), before[n].nan_to_num()) for n, tensor in own_parameters(engine).items())
    again = engine.find_nonfinite(batch)
    if has_fault:
        own[fault.weight].view(-1)[0] = kept
    return text, again, report.skipped, same


GRAPHS = {"cuda_graphs": {"impl": "emulate", "scope": [], "warmup_steps": 1}}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "faults", "rest"),
    [
        ({"tp": 2, "pp": 2}, FAULTS + WEIGHTS, {}),
        ({"pp": 2, "dp": 2}, FAULTS, {}),
        ({"dp": 2}, FAULTS, {}),
        ({"tp": 2}, FAULTS + WEIGHTS, GRAPHS),
    ],
    ids=["tp2-pp2", "pp2-dp2", "dp2", "tp2-graphs"],
)
def test_every_rank_stops_at_the_step_unchanged_and_names_the_op_that_broke(lab, mesh, faults, rest):
    results = lab.run(Case("fragile", mesh, rest, job=breaking, job_arguments=(faults,)))
    for number, fault in enumerate(faults):
        of_ranks = [result[number] for result in results]
        assert len(set(map(str, of_ranks))) == 1, of_ranks
        text, found, skipped, same = of_ranks[0]
        assert (skipped, same) == (True, True)
        assert text.startswith(f"step {2 * number + 2} has NaN or Inf (loss ")
        assert str(found) in text
        assert "fix: " in text
        check(found, fault, mesh)


def check(found: Any, fault: Fault, mesh: dict[str, int]) -> None:
    assert (found.name, found.phase, found.op, found.microbatch) == (
        fault.name,
        fault.phase,
        fault.op,
        fault.microbatch,
    )
    assert found.value in fault.value
    assert fault.mark == "" or found.where.line == line_of(fault.mark)
    pp = mesh.get("pp", 1)
    assert pp == 1 or fault.stage == -1 or found.stage == fault.stage
    if fault.weight:
        assert found.rank == fault.tp_rank + (2 * max(0, fault.stage) if pp > 1 else 0)
    elif "dp" in mesh and pp == 1:
        assert found.rank == fault.microbatch // 2


WEIGHT_OF_ONE = "layers.{}.mlp.down.weight"
BIAS = "layers.1.mlp.up.bias"


def breaking_one_rank(decided: Any, batches: list[dict[str, Tensor]], broken: int) -> list[Any]:
    """NaN on one dp rank alone, in a weight of each layer, then in a gradient, once; what is found after each step."""
    found: list[Any] = []
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        is_broken, own = engine.groups.rank == broken, own_parameters(engine)
        for layer in range(4):
            weight, kept = own[WEIGHT_OF_ONE.format(layer)], {name: tensor.clone() for name, tensor in own.items()}
            if is_broken:
                weight.view(-1)[0] = float("nan")
            assert engine.train_step(batches[layer % 2]).skipped
            found.append(engine.find_nonfinite(batches[layer % 2]))
            for name, tensor in kept.items():
                own[name].copy_(tensor)
            assert not engine.train_step(batches[0]).skipped
            assert engine.find_nonfinite(batches[0]) is None
        _break_what_is_updated(engine, is_broken)
        assert engine.train_step(batches[0]).skipped
        found.append(engine.find_nonfinite(batches[0]))
        for name, tensor in kept.items():
            own[name].copy_(tensor)
        gradient = next(slot.main_grad for slot in engine.optimizer.buffers.slots if slot.local.fqn == BIAS)
        before, executor = engine.executor.before_backward, engine.executor
        assert before is not None

        def breaks(is_last: bool) -> None:
            before(is_last)
            if is_last and is_broken:
                gradient.fill_(float("nan"))  # the last microbatch adds to it

        executor.before_backward = breaks
        assert engine.train_step(batches[0]).skipped
        executor.before_backward = before
        found.append(engine.find_nonfinite(batches[0]))
    return found


def _break_what_is_updated(engine: Engine, is_broken: bool) -> None:
    """NaN in the part of the parameters that this rank updates, while others may still gather it: as they all do here
    before the next step."""
    if is_broken:
        _, part = next(each for each in engine.optimizer.shards[0].bucket.updated_parameters if each[1].numel())
        part[0] = float("nan")
    engine.optimizer.buffers.start_parameter_gather()
    engine.optimizer.wait_parameters()


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [0, 1])
def test_what_was_not_finite_on_one_rank_alone_is_named_with_it_after_all_have_it(lab: Lab, broken: int):
    results = lab.run(Case("fragile", {"dp": 2}, {}, job=breaking_one_rank, job_arguments=(broken,)))
    assert results[0] == results[1]
    *weights, of_all, gradient = results[0]
    assert (of_all.phase, of_all.ranks) == ("parameter", (broken,))
    for layer, found in enumerate(weights):
        assert (found.phase, found.name) == ("parameter", WEIGHT_OF_ONE.format(layer))
        assert (found.rank, found.ranks, found.value) == (broken, (broken,), "NaN")
    assert (gradient.phase, gradient.name, gradient.ranks) == ("once", BIAS, (broken,))
    assert f"(rank {broken})" in str(gradient)


def test_a_weight_that_was_bad_on_several_ranks_is_named_with_all_of_them():
    def bad(rank: int, was_first: bool) -> Seen:
        return Seen((NonFinite(PARAMETER, "up.weight", "NaN", rank=rank, place=(0 if was_first else 1,)),))

    found = first_of([bad(0, False), bad(1, True), *(bad(rank, True) for rank in range(3, 9))])
    assert found is not None
    assert found.ranks == (1, 3, 4, 5, 6, 7, 8)
    assert str(found) == "the parameter up.weight had NaN before the step (ranks 1, 3, 4, 5 and 3 more)"


def skipping(decided: Any, batches: list[dict[str, Tensor]], scale: float) -> list[Any]:
    """Bad steps from a scale on, until the guard has had enough."""
    with Engine(decided, timeout_seconds=HANG_SECONDS) as engine:
        guard, scales = NonFiniteGuard(engine), []
        if engine.loss_scale.tensor is not None:
            engine.loss_scale.tensor.fill_(scale)
        bad = batches[0] | {"depths": -batches[0]["depths"]}
        for step in range(200):
            report = engine.train_step(bad)
            scales.append(engine.loss_scale.value)
            try:
                guard.check(bad, report, step)
            except NonFiniteError as error:
                return [scales, str(error).splitlines()[0].split(" (loss")[0]]
        return [scales, ""]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("precision", "scales", "text"),
    [
        ({"loss_scale": "dynamic"}, [2.0, 1.0, 1.0], "step 3 has NaN or Inf for 3 steps in a row"),
        ({"loss_scale": "dynamic", "nonfinite": "stop"}, [2.0], "step 1 has NaN or Inf"),
        ({"nonfinite": "skip"}, [1.0] * 100, "step 100 has NaN or Inf for 100 steps in a row"),
        ({}, [1.0], "step 1 has NaN or Inf"),
    ],
    ids=["dynamic", "dynamic stop", "skip", "default"],
)
def test_steps_are_skipped_as_the_spec_says(lab, precision, scales, text):
    rest = {"precision": {"parameters": "float64", **precision}}
    results = lab.run(Case("fragile", {}, rest, num_sequences=2, job=skipping, job_arguments=(4.0,)))
    assert results == [[scales, text]]


def test_an_overflow_in_float16_is_named_and_halves_the_loss_scale():
    entry = families.build("fragile")
    entry.model.float().train()
    entry.inputs = {n: (s, torch.float16 if d.is_floating_point else d, h) for n, (s, d, h) in entry.inputs.items()}
    precision = {"parameters": "float16", "loss_scale": "dynamic"}
    with Engine(plan(entry.model, spec_of(entry, Case("fragile", {}, {"precision": precision})))) as engine:
        guard, batch, before = NonFiniteGuard(engine), entry.batch(8, 0), engine.loss_scale.value
        own_parameters(engine)["layers.2.mlp.up.weight"].fill_(
            3000.0
        )  # sums of 16, and their squares, are more than 65504
        engine.optimizer.sync_main_from_parameters()
        report = engine.train_step(batch)
        guard.check(batch, report, 0)
        found = engine.find_nonfinite(batch)
    assert (report.skipped, engine.loss_scale.value) == (True, before / 2)
    assert found is not None
    assert (found.name, found.phase, found.value) == ("layers.2.mlp.up", "forward", "infinity")


SPEC = """mesh: {dp: 2}
batch: {global: 8, micro: 2}
inputs: {input_ids: {shape: [64], dtype: int64, high: 256}, targets: {like: input_ids}}
optimizer: {lr: 1.0e+30, clip_grad_norm: null}
"""


@pytest.mark.thorough
def test_training_ends_with_exit_code_1_and_one_message(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    command = ["train", "examples/gpt.py:build", str(tmp_path / "spec.yaml"), "--data", "stdlib", "--steps", "6"]
    ended = python("-m", "runtime.cli", *command, "--nproc", "2")
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("Error: step 2 has NaN or Inf (loss ") == 1
    assert "of the forward comes from" in ended.stderr
    assert "gpt.py:" in ended.stderr
