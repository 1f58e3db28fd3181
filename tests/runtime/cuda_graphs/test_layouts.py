"""Graphs on several ranks give what the same layout gives without; parameters are there before a replay reads them."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from runtime import Engine
from runtime.cuda_graphs.full_iteration import FullIteration
from runtime.optimizer.buffers import GradientBuffers
from runtime.optimizer.slots import all_gather
from tests.tools.captures import plan_again
from tests.tools.graphed_runs import SCOPES, STEPS, Trained, differ, differences, on_ranks, train_on, trained
from tests.tools.laboratory import Case, Lab
from tests.tools.limits import HANG_SECONDS

INTERLEAVED = {"pipeline": {"schedule": "interleaved_1f1b"}}
SEQUENCE = {"tensor_parallel": {"sequence_parallel": True}}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2}, {}),
    ({"tp": 2, "pp": 2}, {"pipeline": {"schedule": "gpipe"}}),
    ({"tp": 2, "dp": 2}, SEQUENCE | {"optimizer": {"bucket_size": 5000}}),
    ({"tp": 2, "pp": 2, "vpp": 2}, INTERLEAVED | SEQUENCE),
    ({"cp": 2, "tp": 2}, {}),
    ({"cp": 2, "pp": 2}, {}),
]
# (layout, scopes): what differs between families is in the regions, what differs between layouts is around them
CASES = {
    "gpt2-dropout": [*((i, [["attn"], [], ["full_iteration"]]) for i in range(4)), (5, [["attn"]])],
    "llama": [(0, [["attn", "mlp"]]), (3, [["mlp"], ["full_iteration"]]), (4, [["attn", "mlp"], ["full_iteration"]])],
    "t5": [(0, [[], ["full_iteration"]])],
}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "scopes"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_layouts_with_graphs_give_what_they_give_without(lab: Lab, name, layout, scopes):
    mesh, sections = LAYOUTS[layout]
    eager = on_ranks(lab, name, None, mesh=mesh, **sections)
    for scope in scopes:
        if name == "t5":  # without regions, linears of both blocks that read the encoder are one op: its own order
            eager = on_ranks(lab, name, scope, captures=False, mesh=mesh, **sections)
        assert differ(eager, on_ranks(lab, name, scope, mesh=mesh, **sections)) == [[]] * 4, scope


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("scope", [["mlp"], ["attn"], []], ids=str)
@pytest.mark.parametrize(
    ("mesh", "schedule"), [({"pp": 2}, "zero_bubble"), ({"pp": 2, "vpp": 2}, "zero_bubble_v")], ids=["h1", "v"]
)
def test_no_weight_gradient_that_waits_reads_memory_of_the_next_microbatch(lab: Lab, mesh, schedule, scope):
    """Of a post-norm model, whose products read what the region before them made."""
    sections = {"mesh": mesh, "pipeline": {"schedule": schedule}}
    eager = on_ranks(lab, "bert", None, **sections)
    assert differ(eager, on_ranks(lab, "bert", scope, **sections)) == [[]] * 2


def places_of_messages(plan: Any, batches: Any) -> tuple[int, set[int], set[int]]:
    """On a rank: how many tensors a capture sent or received, where they lie, and where its static buffers do."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.train_step(batches[0])
        seen: list[int] = []
        for name in ("isend", "irecv"):
            call = getattr(dist, name)
            patch.setattr(dist, name, lambda x, *a, call=call, **k: (seen.append(x.data_ptr()), call(x, *a, **k))[1])
        engine.capture_graphs()
        engine.forward_backward(batches[1])
        assert isinstance(engine.graphs, FullIteration)
        assert engine.graphs._messages is not None
        return len(seen), set(seen), {tensor.data_ptr() for tensor in engine.graphs._messages.tensors}


@pytest.mark.thorough
@pytest.mark.slow
def test_messages_of_a_whole_iteration_lie_in_few_buffers_however_many_there_are(lab: Lab):
    """A graph never uses the memory again that NCCL touched in its capture."""
    rest = {"train": False, "cuda_graphs": {"impl": "emulate", "scope": ["full_iteration"]}}
    found = lab.run(Case("gpt2", {"pp": 2}, rest, num_sequences=16, job=places_of_messages))
    for count, seen, standing in found:
        assert count == 2 * 2 * 8  # the warm-up and the capture: a value and a gradient of each microbatch
        assert seen == standing
        assert len(seen) == 2 * 2


def train_behind_late_gathers(plan: Any, batches: Any, hooks: bool) -> Trained:
    """Two steps on two dp ranks; updated parameters are gathered when somebody waits for them, and not before."""

    def start_parameter_gather(self: GradientBuffers) -> None:
        for *place, bucket in reversed(self._order):
            waiting = SimpleNamespace(wait=partial(all_gather, bucket.parameters, bucket.own_parameters, group=group))
            self._gathers[place[0], place[1]] = waiting

    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine, pytest.MonkeyPatch.context() as patch:
        if engine.graphs is not None:
            engine.capture_graphs()
        group = engine.groups.over("dp")
        patch.setattr(GradientBuffers, "start_parameter_gather", start_parameter_gather)
        assert engine.program.gate is not None
        if not hooks:
            engine.program.gate.wait = None
        return train_on(engine, batches[:STEPS])


@pytest.mark.thorough
@pytest.mark.slow
def test_parameters_are_waited_for_before_a_replay_reads_them(lab: Lab):
    eager, graphed, in_one, without_hooks = (late(lab, *given)[0] for given in LATE)
    assert differences(eager, graphed) == []
    assert differences(eager, in_one) == []
    assert differences(eager, without_hooks)


def late(lab: Lab, scope: list[str] | None, hooks: bool) -> list[Trained]:
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "emulate", "scope": scope}}
    rest = {"train": False, "optimizer": {"bucket_size": 5000}, **graphs}
    return lab.run(Case("gpt2", {"dp": 2}, rest, job=train_behind_late_gathers, job_arguments=(hooks,)))


LATE: list[tuple[list[str] | None, bool]] = [
    (None, True),
    (["attn", "mlp"], True),
    (["full_iteration"], True),
    (["attn", "mlp"], False),
]


RECOMPUTED = {
    "gpt2-dropout, full": [None, *SCOPES],
    "gpt2-dropout, selective": [["attn", "mlp"], []],
    "t5, full": [["attn"]],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", RECOMPUTED)
def test_regions_whose_blocks_are_computed_again_give_what_they_give_eagerly_without(case: str):
    name, kind = case.split(", ")
    eager = trained(name, None)
    for scope in RECOMPUTED[case]:
        assert differences(eager, trained(name, scope, recompute=kind)) == [], scope


@pytest.mark.thorough
def test_several_microbatches_in_flight_draw_again_what_each_drew():
    sections = {"mesh": {}, "batch": {"global": 8, "micro": 2}, "pipeline": {"schedule": "gpipe"}}
    eager = trained("gpt2-dropout", None, **sections)
    assert differences(eager, trained("gpt2-dropout", ["attn"], recompute="full", **sections)) == []


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_replays_name_the_same_numbers_again_in_their_backward(kind: str, schedule: str):
    sections = {"dropout": "layout_invariant", "pipeline": {"schedule": schedule}}
    eager = trained("gpt2-dropout", None, **sections)
    for scope in (["attn"], ["full_iteration"]):
        assert differences(eager, trained("gpt2-dropout", scope, recompute=kind, **sections)) == [], scope


class Mixing(nn.Module):
    """The first product reads positions as features: a view from which it copies its rows, for its backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.over, self.down = nn.LayerNorm(8), nn.Linear(6, 6), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.over(self.norm(x).transpose(1, 2)).transpose(1, 2)))


class Choosing(nn.Module):
    """Each position scales its largest feature: one_hot looks at its numbers on the host of a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y) * torch.nn.functional.one_hot(y.argmax(-1), 8).to(y.dtype))


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(block() for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def differences_of_recompute(block: type[nn.Module], graphs: dict[str, Any]) -> list[str]:
    """Between runs without recompute, and with it and with graphs."""
    found = []
    for more in ({}, {"recompute": "full", **graphs}):
        inputs = {"x": {"shape": [6, 8], "dtype": "float64"}}
        spec = {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": inputs, **more}
        generator = torch.Generator().manual_seed(0)
        batches = [{"x": torch.randn(4, 6, 8, dtype=torch.float64, generator=generator)} for _ in range(3)]
        with Engine(plan_again(Net(block), spec), timeout_seconds=HANG_SECONDS) as engine:
            if engine.graphs is not None:
                engine.capture_graphs()
            found.append(train_on(engine, batches))
            assert bool(more) == bool(engine.plan.recomputed)
    return differences(*found)


WHOLE_BLOCKS = {"cuda_graphs": {"impl": "emulate", "scope": []}}


@pytest.mark.parametrize("graphs", [{}, WHOLE_BLOCKS], ids=["eager", "graphs"])
def test_a_product_that_copies_its_rows_saves_them_again_in_the_rerun(graphs: dict[str, Any]):
    assert differences_of_recompute(Mixing, graphs) == []


@pytest.mark.thorough
def test_a_rerun_is_captured_by_the_rules_of_its_forward():
    """Autograd runs the backward without the mode of the capture that stands in for one_hot."""
    assert differences_of_recompute(Choosing, WHOLE_BLOCKS) == []
