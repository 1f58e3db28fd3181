"""What a model computes in float32 inside of bfloat16 stays in float32, whatever the layout.

y = (float(x) + 4096) - 4096      in bfloat16, 8 bits wide, nothing of x would be left
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from runtime import Engine
from runtime.verify.reference import OneProcess
from tests.tools.simulated_mesh import run_mesh, spec_of

VOCABULARY, WIDTH, LARGE = 64, 32, 4096.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(self.norm(x))
        kept = (inner.float() + LARGE) - LARGE
        return x + self.down(torch.tanh(kept).to(x.dtype))


class Islands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


def build() -> Islands:
    torch.manual_seed(5)
    return Islands()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randint(VOCABULARY, (4, 8), generator=generator) for n in ("input_ids", "targets")}


def far(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest distance of a gradient, beside its norm."""
    return max(float((found[n].double() - g.double()).norm() / g.double().norm()) for n, g in truth.items())


def truth() -> tuple[float, dict[str, Tensor]]:
    model = build().bfloat16()
    loss = model(**batch())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_plan_in_bfloat16_computes_the_island_as_the_model_does():
    loss, gradients = truth()
    engine = Engine(plan(build(), spec_of(batch(), {}, precision={"parameters": "bfloat16"})))
    assert engine.forward_backward(batch()) == pytest.approx(loss, rel=1e-6)
    assert far(engine.gather_gradients(), gradients) < 1e-2
    in_float32 = OneProcess(build(), engine.spec).model.float()
    assert in_float32(**batch()).item() != pytest.approx(loss, rel=1e-6)


def test_the_island_is_float32_on_shards_too():
    loss, gradients = truth()
    ran = run_mesh(lambda: build().bfloat16(), batch(), {"tp": 2})
    assert ran.loss.item() == pytest.approx(loss, rel=5e-3)
    assert far(ran.gradients, gradients) < 2e-2
    islands = [n for p in ran.programs[0].stages for n in p.module.graph.nodes if "tanh" in str(n.target)]
    assert len(islands) == 2
    assert all(n.meta["val"].dtype == torch.float32 for n in islands)
    assert {p.style for p in ran.plan.parameters if p.name.endswith("up.weight")} == {"column"}
