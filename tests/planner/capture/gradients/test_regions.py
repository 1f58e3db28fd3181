"""Calls under no_grad stop gradients, whatever else a forward does; writes that autograd does not see are refused."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from passes.errors import PlanError
from planner.capture.export import capture


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))


class BesideVmap(TwoLinears):
    """PyTorch's decompositions, which take vmap apart, put a region in line without a stop."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        with torch.no_grad():
            scale = h * 2
        return {"loss": (scale * torch.vmap(lambda row: row * row)(self.second(h))).sum()}


class RegionsInEachOther(TwoLinears):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        with torch.no_grad():
            before = h * 2
            with torch.enable_grad():
                inner = self.second(before)
            after = inner + h
        return {"loss": (h * after + inner).sum()}


class WritesOfNoGradient(TwoLinears):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, table = self.first(x), torch.zeros_like(x)
        with torch.no_grad():
            table[0].copy_(h[0])
            table.add_(1)
        return {"loss": (self.second(h) * table).sum()}


class ReadsWhatWasWritten(TwoLinears):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, table = self.first(x), torch.zeros_like(x)
        table[0] = h[0]
        with torch.no_grad():
            scale = table * 2
        return {"loss": (self.second(h) * scale + table).sum()}


def assert_equal_gradients(model: TwoLinears) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    program = capture(model, {"x": x})
    holders = program.graph.graph.find_nodes(op="placeholder")
    held = dict(model.named_parameters())
    given = [x if n.name in program.inputs else held[program.parameters[n.name]] for n in holders]
    loss = fx.Interpreter(program.graph).run(*given)[0]
    expected = torch.autograd.grad(model(x)["loss"], list(held.values()), materialize_grads=True)
    found = torch.autograd.grad(loss, list(held.values()), materialize_grads=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [BesideVmap, RegionsInEachOther, WritesOfNoGradient, ReadsWhatWasWritten])
def test_gradients_are_those_of_the_forward(kind: type[TwoLinears]) -> None:
    assert_equal_gradients(kind())


class Hidden(TwoLinears):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        self.write(h)
        return {"loss": self.second(h).square().sum()}

    def write(self, h: Tensor) -> None:
        with torch.no_grad():
            h.mul_(2)


class HiddenPart(Hidden):
    def write(self, h: Tensor) -> None:
        with torch.no_grad():
            h[0].mul_(2)


class HiddenByDetach(Hidden):
    def write(self, h: Tensor) -> None:
        h.detach().mul_(2)


class HiddenAfterAWrite(Hidden):
    def write(self, h: Tensor) -> None:
        table = torch.zeros_like(h)
        table[0] = h[0]
        with torch.no_grad():
            table[1] = 1.0


@pytest.mark.parametrize("kind", [Hidden, HiddenPart, HiddenByDetach, HiddenAfterAWrite])
def test_writes_that_autograd_does_not_see_are_refused_where_a_gradient_passes(kind: type[Hidden]) -> None:
    with pytest.raises(PlanError, match="writes in place into a value that has a gradient") as caught:
        capture(kind(), {"x": torch.randn(2, 4, dtype=torch.float64)})
    assert "test_regions.py" in str(caught.value.where)


class Drawn(TwoLinears):
    """Views, writes in place, and regions without gradients, in an order that ``seed`` decides."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        draw = random.Random(self.seed)
        values = [self.first(x), torch.zeros(3, 4, dtype=torch.float64), x * 1.0]
        for _ in range(draw.randint(3, 8)):
            value, other, step = draw.choice(values), draw.choice(values), draw.choice((*WRITES, *WRITES, *VALUES))
            with torch.set_grad_enabled(draw.random() > 0.35):
                made = step(value, other)
            values += [made] if step in VALUES else []
        return {"loss": sum((v * (i + 1)).sin().sum() for i, v in enumerate(values)) + self.second(x).sum()}


WRITES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.mul_(1.5),
    lambda x, y: x.add_(y.sum()),
    lambda x, y: x[0].fill_(0.3),
    lambda x, y: x[-1].zero_(),
    lambda x, y: x.copy_(y.mean() * torch.ones_like(x)),
]
VALUES: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x[:1],
    lambda x, y: x.t(),
    lambda x, y: (x * x + y.sum()).tanh(),
    lambda x, y: x.clone(),
    lambda x, y: x.detach(),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200))
def test_drawn_writes_and_regions_have_the_gradients_of_one_process_or_are_refused(seed: int) -> None:
    model = Drawn(seed)
    try:
        model(torch.ones(3, 4, dtype=torch.float64))["loss"].backward()
    except RuntimeError:  # autograd refuses it too
        return
    try:
        assert_equal_gradients(model)
    except PlanError as error:
        if "writes in place into a value that has a gradient" not in error.what:
            raise
