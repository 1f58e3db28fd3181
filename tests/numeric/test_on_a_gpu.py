"""On a GPU every model trains as the unmodified model does on it; so do ranks of a mesh that share the GPU.

Ranks are threads of this process (tests/tools/simulated_mesh.py): their local programs run on the GPU, and what they
exchange is computed there too. What is compared lies within float64's rounding, unless a test says otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import plan
from planner.capture.gradients.applications import LowestPrecision
from runtime import Engine
from tests.models import (
    adapted,
    counted,
    dropping,
    experts,
    families,
    held_weights,
    own,
    own_functions,
    signals,
    sorted_experts,
    uneven,
    untrained,
)
from tests.numeric import test_lengths, test_muon, test_update_rules
from tests.numeric.test_expert_layouts import OPENED, STACKED, built, check, layer_of
from tests.tools import training
from tests.tools.comparison import LIMITS
from tests.tools.graphed_runs import spec_of
from tests.tools.simulated_mesh import run_mesh

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda:0")
ALL = families.FAMILIES | own.MODELS | own_functions.FUNCTIONS | counted.MODELS | signals.SIGNALS
ALL |= held_weights.HELD_WEIGHTS | dropping.MODELS | untrained.MODELS | uneven.MODELS
if find_spec("peft") is not None:
    ALL |= adapted.ADAPTED
DRAWING = {"dropout", "dropping"}  # a GPU draws other numbers than a CPU
NAMES = sorted(name for name in ALL if not any(word in name for word in DRAWING))
SINGLE = {"mixtral", "mixtral-balanced"}  # in float32: grouped products have no float64
FLOAT32 = {"precision": {"parameters": "float32"}}
CUT = {"tensor_parallel": {"sequence_parallel": True, "vocabulary_multiple": 8}}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "tp2, sequence parallel": ({"tp": 2}, CUT),
    "cp2": ({"cp": 2}, {}),
    "cp2·tp2·dp2, recomputed": ({"cp": 2, "tp": 2, "dp": 2}, {"recompute": "full"} | CUT),
}
OF_EXPERTS: dict[str, dict[str, int]] = {
    "alone": {},
    "tp2·dp2·ep2, etp 1": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "tp2·dp2·ep2, etp 2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "cp2·tp2·ep4, etp 1": {"cp": 2, "tp": 2, "ep": 4, "etp": 1},
}


@dataclass(frozen=True)
class Truth:
    """Loss and gradients of the unmodified model, the whole batch at once, and its lowest precision.

    On the GPU too: of one CTC loss PyTorch's gradients there and on a CPU differ by a few percent.
    """

    loss: float
    gradients: dict[str, Tensor]
    precision: torch.dtype

    def hold(self, loss: float, gradients: dict[str, Tensor]) -> None:
        """Assert that a run found the same. A gradient's scale is its own size, or the largest one's rounding."""
        loss_limit, limit = LIMITS[self.precision]
        assert loss == pytest.approx(self.loss, rel=loss_limit)
        noise = 1e-7 if self.precision is torch.float64 else 1e-3
        smallest = noise * max(x.abs().max().item() for x in self.gradients.values())
        for name, expected in self.gradients.items():
            size = max(expected.abs().max().item(), smallest)
            wrong = (gradients[name].cpu().double() - expected.cpu().double()).abs().max().item() / size
            assert wrong <= limit, f"{name}: {wrong:.1e} of {size:.1e}"


def truth_of(name: str, batch: dict[str, Tensor], precision: torch.dtype = torch.float64) -> Truth:
    entry = families.build(name)
    entry.model.to(GPU, precision)
    batch = {key: x.to(GPU) for key, x in batch.items()}
    with LowestPrecision() as seen:
        loss = entry.loss(entry.model(**batch))
        loss.backward()
    return Truth(loss.item(), {n: p.grad for n, p in entry.model.named_parameters() if p.grad is not None}, seen.dtype)


def check_engine(name: str, truth_in: torch.dtype = torch.float64, **sections: Any) -> None:
    entry = families.build(name)
    batch = entry.batch(8, 0)
    truth = truth_of(name, batch, truth_in)
    with Engine(plan(entry.model, spec_of(entry, None, **sections)), device=GPU) as engine:
        truth.hold(engine.forward_backward(batch), engine.gather_gradients())


@pytest.mark.parametrize("name", NAMES)
def test_every_model_trains_as_it_does_in_plain_pytorch(name: str) -> None:
    check_engine(name, *([torch.float32] if name in SINGLE else []))


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "own-router"])
def test_recomputed(name: str, kind: str) -> None:
    check_engine(name, recompute=kind)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_compiled(name: str) -> None:
    check_engine(name, torch.float32, compile=True, **FLOAT32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt", "qwen3", "gemma2"])
def test_ranks_of_a_mesh(name: str, layout: str) -> None:
    mesh, more = LAYOUTS[layout]
    batch = families.build(name).batch(2 * mesh.get("dp", 1), 0)
    ran = run_mesh(lambda: families.build(name).model, batch, mesh, device=GPU, **more)
    truth_of(name, batch).hold(ran.loss.item(), ran.gradients)


@pytest.mark.parametrize("layout", OF_EXPERTS)
@pytest.mark.parametrize("way", [*OPENED, *STACKED], ids=lambda w: w.__name__)
def test_experts(way: Callable[..., Tensor], layout: str) -> None:
    check(lambda: built(partial(layer_of, way)), OF_EXPERTS[layout], length=8, device=GPU)


def sorting(way: sorted_experts.Way) -> nn.Module:
    torch.manual_seed(3)
    return experts.Net(sorted_experts.Sorting(way))


@pytest.mark.parametrize("layout", OF_EXPERTS)
@pytest.mark.parametrize("way", sorted_experts.WAYS, ids=lambda w: w.__name__)
def test_experts_with_sorted_rows(way: sorted_experts.Way, layout: str) -> None:
    check(lambda: sorting(way), OF_EXPERTS[layout], 1e-5, length=8, device=GPU)


def test_a_save_of_a_gpu_goes_on_there_to_the_bit_and_on_a_cpu_within_rounding(tmp_path: Path) -> None:
    entry = families.build("llama")
    made = plan(entry.model, spec_of(entry, None))
    with Engine(made, device=GPU) as engine:
        engine.train_step(entry.batch(8, 0))
        engine.save(tmp_path)
        engine.train_step(entry.batch(8, 1))
        truth = engine.gather_parameters()
    for device, limit in ((GPU, 0.0), ("cpu", 1e-6)):
        with Engine(made, device=device) as engine:
            engine.load(tmp_path)
            engine.train_step(entry.batch(8, 1))
            found = engine.gather_parameters()
        assert all((found[name].cpu() - truth[name].cpu()).abs().max() <= limit for name in truth)


@pytest.mark.parametrize("name", [name for name in test_update_rules.RULES if name != "lion"])
def test_an_update_rule_is_that_of_torch(name: str) -> None:
    rule, entry = test_update_rules.RULES[name], families.build("gpt")
    batches = [entry.batch(8, step) for step in range(test_update_rules.STEPS)]
    with Engine(plan(entry.model, test_update_rules.ruled(entry, rule, mesh={})), device=GPU) as engine:
        losses = [engine.train_step(batch).loss for batch in batches]
    assert losses == pytest.approx(test_update_rules.alone(rule, "cuda").losses, rel=1e-10)


def test_muon_is_that_of_torch() -> None:
    entry = families.build("gpt")
    batches = [entry.batch(8, step) for step in range(test_muon.STEPS)]
    with Engine(plan(entry.model, training.spec_of(entry, mesh={}, optimizer=test_muon.RULE)), device=GPU) as engine:
        losses, found = [engine.train_step(batch).loss for batch in batches], engine.gather_parameters()
    wanted, truth = test_muon.alone("gpt", "match_rms_adamw", torch.float64, "cuda")
    assert losses == pytest.approx(wanted, rel=1e-6)
    for fqn, value in found.items():
        assert (value.cpu() - truth[fqn].cpu()).norm() <= 1e-6 * truth[fqn].norm(), fqn


@pytest.mark.parametrize("scope", [None, ["attn", "mlp"], ["full_iteration"]], ids=str)
@pytest.mark.parametrize("name", ["gpt", "t5"])
def test_several_lengths(name: str, scope: list[str] | None) -> None:
    entry = families.build(name)
    lengths = test_lengths.lengths_of(entry, (1, 1 / 3, 2 / 3, 1, 1 / 3, 1, 2 / 3, 1 / 3))
    batches = test_lengths.batches_of(entry, lengths, (8,) * len(lengths))
    graphs = {} if scope is None else {"cuda_graphs": {"impl": "local", "scope": scope, "warmup_steps": 1}}
    spec = training.spec_of(entry, sorted(set(lengths)), mesh={}, **graphs)
    with Engine(plan(entry.model, spec), device=GPU) as engine:
        losses = [engine.train_step(batch).loss for batch in batches]
    entry = families.build(name)
    entry.model.to(GPU)
    placed = [{key: x.to(GPU) for key, x in batch.items()} for batch in batches]
    assert losses == pytest.approx(test_lengths.alone(entry, placed).losses, rel=1e-10)
