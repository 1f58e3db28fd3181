"""Checks of values that only raise: assumed not to, reported, and made on the host where they read the batch alone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from planner import PlanError, plan
from planner.capture.selection.conditions import condition_of
from planner.frozen_plan import Plan
from runtime.data.batches import BatchLayout

SPEC = {
    "mesh": {"tp": 1},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"ids": {"shape": [5], "dtype": "int64", "high": 20}},
}


class Model(nn.Module):
    def __init__(self, check: Callable[[Any, Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.tokens, self.head, self.check = nn.Embedding(20, 8), nn.Linear(8, 20), check
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            found = self.check(self, layer(x), ids)
            x = layer(x) if found is None else found
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def any_of_ids(m: Any, x: Tensor, ids: Tensor) -> None:
    if (ids > 17).any():
        raise IndexError(f"an id above 17: {ids.max()}")


def not_all_of_ids(m: Any, x: Tensor, ids: Tensor) -> None:
    if not (ids <= 17).all():
        raise IndexError("an id above 17")


def largest_asserted(m: Any, x: Tensor, ids: Tensor) -> None:
    assert ids.max() <= 17


def largest_in_python(m: Any, x: Tensor, ids: Tensor) -> None:
    if ids.max().item() > 17:
        raise IndexError


def counted(m: Any, x: Tensor, ids: Tensor) -> None:
    if (ids > 17).sum() > 0:
        raise IndexError


def compared(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    if torch.equal(ids, ids.clamp(max=17)):
        return x
    raise IndexError


def torch_assert(m: Any, x: Tensor, ids: Tensor) -> None:
    torch._assert((ids <= 17).all(), "an id above 17")


def torch_assert_async(m: Any, x: Tensor, ids: Tensor) -> None:
    torch._assert_async((ids <= 17).all(), "an id above 17")


def some_small(m: Any, x: Tensor, ids: Tensor) -> None:
    if not (ids <= 17).any():
        raise IndexError("none")


def torch_check(m: Any, x: Tensor, ids: Tensor) -> None:
    torch._check_tensor_all_with(ValueError, (ids > 17).sum() == 0, lambda: "an id above 17")


OF_THE_BATCH = [any_of_ids, not_all_of_ids, largest_asserted, largest_in_python, counted, compared, torch_assert,
                torch_assert_async, some_small, torch_check]  # fmt: skip


def planned(check: Callable[[Any, Tensor, Tensor], Tensor | None]) -> Plan:
    return plan(Model(check), SPEC)


def layout_of(made: Plan) -> BatchLayout:
    decisions, _ = made.to_run()
    return BatchLayout({"ids": ((5,), torch.int64)}, 4, 2, 1, 0, assumptions=tuple(decisions.program.assumptions))


@pytest.mark.thorough
@pytest.mark.parametrize("check", OF_THE_BATCH, ids=lambda f: f.__name__)
def test_a_check_of_the_batch_is_reported_once_and_made_for_each_microbatch(check: Any) -> None:
    made = planned(check)
    rows = [row for row in made.diagnostics if row.what.startswith("assumed: ")]
    assert [row.level for row in rows] == ["info"]
    assert "checked on the host" in rows[0].what
    assert f"{check.__code__.co_filename.rsplit('/')[-1]}:" in rows[0].where
    layout, ids = layout_of(made), torch.full((4, 5), 17)
    layout.check({"ids": ids})
    ids[2:] = 18  # the second microbatch
    with pytest.raises(PlanError, match="rows 2 to 3") as error:
        layout.check({"ids": ids})
    assert "test_assumed.py" in str(error.value)


def finite(m: Any, x: Tensor, ids: Tensor) -> None:
    if not torch.isfinite(x).all():
        raise RuntimeError("not finite")


def weights_are_numbers(m: Any, x: Tensor, ids: Tensor) -> None:
    assert not torch.isnan(m.head.weight).any()


def distribution(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return torch.distributions.Normal(x, F.softplus(x) + 1, validate_args=True).mean


def close(m: Any, x: Tensor, ids: Tensor) -> None:
    assert torch.allclose(x, x.contiguous())


def variance(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * F.gaussian_nll_loss(x, x.detach(), F.softplus(x) + 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "check", [finite, weights_are_numbers, distribution, close, variance], ids=lambda f: f.__name__
)
def test_a_check_of_what_the_forward_computes_is_reported_as_not_checked(check: Any) -> None:
    rows = [row.what for row in planned(check).diagnostics if row.what.startswith("assumed: ")]
    assert len(rows) >= 1
    assert all("not checked during training" in what for what in rows)


def two_ways(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * 2 if (ids <= 17).all() else x  # here


def raised_for_another(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    if (ids <= 17).all():  # here
        if x.shape[-1] != 8:
            raise ValueError
        return x * 2
    return x


def caught(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    try:
        assert ids.max() < 17  # here
    except AssertionError:
        return x * 2
    return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", [two_ways, raised_for_another, caught], ids=lambda f: f.__name__)
def test_a_branch_of_which_no_side_raises_is_refused_at_its_line(check: Any) -> None:
    with pytest.raises(PlanError, match="depends on the values of tensors") as error:
        planned(check)
    assert "ids" in error.value.where.code  # pyright: ignore
    assert "u0" not in str(error.value)


def test_the_branch_that_does_not_raise_is_what_the_plain_model_computes() -> None:
    """The captured graph beside the model, on a batch that passes the check."""
    from planner.capture.export import capture

    torch.manual_seed(0)
    model, ids = Model(compared), torch.randint(0, 17, (2, 5))
    program = capture(model, {"ids": ids})
    own = dict(model.named_parameters())
    given = [own[program.parameters[n.name]] if n.name in program.parameters else ids
             for n in program.graph.graph.find_nodes(op="placeholder")]  # fmt: skip
    torch.testing.assert_close(program.graph(*given)[0], model(ids))


def test_a_check_of_as_many_values_as_data_tells_is_not_made_on_the_host() -> None:
    sizes = ShapeEnv()
    graph = fx.Graph()
    values = graph.placeholder("values")
    with FakeTensorMode(shape_env=sizes):
        values.meta["val"] = torch.empty(sizes.create_unbacked_symint(), 700)
    read = graph.call_function(torch.ops.aten.item.default, (values,))
    assert condition_of(None, True, {"number": read}, SimpleNamespace(root=nn.Module())) is None


def as_an_integer(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * int(ids.max())


def as_an_index(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x * [1, 2, 3][ids[0, 0]]


def as_a_range(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return sum((x for _ in range(ids.max().item())), x)  # pyright: ignore


def as_text(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    return x if f"{ids.float().mean().item():.3f}" else -x


@pytest.mark.parametrize("check", [as_an_integer, as_an_index, as_a_range, as_text], ids=lambda f: f.__name__)
def test_a_number_of_data_in_python_is_refused_at_its_line_in_words(check: Any) -> None:
    with pytest.raises(PlanError, match="depends on the values of tensors") as error:
        planned(check)
    assert "ids" in error.value.where.code  # pyright: ignore
    assert not any(word in str(error.value) for word in ("u0", "unhinted", "Sym", "Boolean"))
