"""Rows that data selects: the captured program computes what the model does, with all rows, or is refused by line."""

from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch
from torch import Tensor, fx

from passes.errors import PlanError, Where
from passes.program.program import Program
from planner.capture.export import capture
from tests.models import mixed_rows, selected_rows
from tests.models.experts import Layer, Net, Way, batch
from tests.models.mixed_rows import ASKING, MIXING
from tests.models.selected_rows import WAYS, Selecting
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import equals_one_process, spec_of


def made(way: Way) -> Net:
    torch.manual_seed(3)
    return Net(Selecting(way)).double()


@cache
def program_of(way: Way) -> Program:
    return capture(made(way), batch())


def in_a_forward(way: Way) -> Selecting:
    """A layer whose own forward is the loop: PyTorch notes the lines of forwards alone."""
    layer = Selecting(way)
    code: CodeType = way.__code__  # pyright: ignore[reportFunctionMemberAccess]
    layer.way = FunctionType(code.replace(co_name="forward"), way.__globals__)
    return layer


def values_of(program: Program, model: Net, given: dict[str, Tensor]) -> list[Tensor]:
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    names = program.parameters | program.buffers
    return [
        own[names[n.name]] if n.name in names else given[n.name] if n.name in given else program.constants[n.name]
        for n in program.graph.graph.find_nodes(op="placeholder")
    ]


def gradients(model: Net, loss: Tensor) -> list[Tensor]:
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def check(model: Net, program: Program, given: dict[str, Tensor]) -> None:
    ours, theirs = program.graph(*values_of(program, model, given))[0], model(**given)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pairs = zip(gradients(model, ours), gradients(model, theirs), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_loss_and_all_gradients_are_those_of_the_model(way: Way) -> None:
    model, program = made(way), program_of(way)
    for seed in range(3):
        check(model, program, batch(seed))


@pytest.mark.thorough
@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("favoured", [[0, 1], [3, 2]])
def test_so_they_are_where_experts_get_no_token_and_others_all(way: Way, favoured: list[int]) -> None:
    model = made(way)
    with torch.no_grad():
        model.get_parameter("layer.gate.weight").mul_(0.1)
        model.get_parameter("layer.gate.bias")[favoured] += torch.tensor([9.0, 8.0], dtype=torch.double)
    check(model, program_of(way), batch(1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [selected_rows.index_add, selected_rows.masks], ids=lambda way: way.__name__)
def test_so_they_are_for_one_token(way: Way) -> None:
    model = made(way)
    one = {name: value[:1, :1] for name, value in batch().items()}
    check(model, capture(model, one), one)


def test_rows_that_nobody_selects_spoil_no_gradient() -> None:
    """A token of zeros: its norm is 0, and x / 0 is NaN; it is masked from the loss by no expert that divides."""
    model = made(_divides_some)
    program = capture(model, batch())
    with torch.no_grad():
        model.get_parameter("layer.gate.weight").zero_()
    check(model, program, batch())
    assert all(g.isfinite().all() for g in gradients(model, program.graph(*values_of(program, model, batch()))[0]))


def _divides_some(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    out, x = torch.zeros_like(x), x * (torch.arange(len(x)) % 2).unsqueeze(-1)
    for e, expert in enumerate(layer.experts):
        token = torch.where((chosen == e).any(-1) & (torch.arange(len(x)) % 2 == 1))[0]
        y = expert(x[token] / x[token].norm(dim=-1, keepdim=True))
        out = out.index_add(0, token, y * x[token].pow(2).sum(-1, keepdim=True).log())
    return out


def test_all_shapes_are_known_and_the_rewrite_is_told() -> None:
    program = capture(Net(in_a_forward(selected_rows.index_add)), batch())
    for node in program.graph.graph.nodes:
        assert all(isinstance(n, int) for n in getattr(node.meta.get("val"), "shape", ()))
    told = [where for what, where in program.rewrites if "selected rows are computed densely" in what]
    assert [where.code for where in told][:1] == ["token, choice = torch.where(chosen == e)"]


def test_an_expert_reads_the_tokens_themselves() -> None:
    """No copy of the tokens for each expert, no dim of choices beside the width."""
    program = program_of(selected_rows.index_add)
    first = [n for n in program.graph.graph.nodes if n.target is torch.ops.aten.linear.default]
    read = {n.args[0] for n in first if str(n.args[1]).endswith("_gate_weight") and "experts" in str(n.args[1])}
    assert len(read) == 1
    assert not [n for n in program.graph.graph.nodes if _is_large(n)]


def _is_large(node: fx.Node) -> bool:
    """More than all tokens with the vocabulary."""
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and value.numel() > 12 * 24


def test_a_mean_of_selected_rows_is_that_of_one_process_and_over_dp_it_is_warned_of() -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return Net(in_a_forward(mixed_rows.mean_of_rows)).double()

    equals_one_process(make, batch(), {"tp": 2})
    made = plan_again(make(), spec_of(batch(), {"dp": 2}))
    assert any("mixes the sequences" in row.what for row in made.diagnostics)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [*MIXING, *ASKING], ids=lambda way: way.__name__)
def test_what_mixes_selected_rows_is_refused_at_its_line(way: Way) -> None:
    with pytest.raises(PlanError) as caught:
        capture(Net(in_a_forward(way)), batch())
    error = caught.value
    assert isinstance(error.where, Where)
    lines = Path(mixed_rows.__file__).read_text().splitlines()
    begin = lines.index(f"def {way.__name__}(layer: Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:")
    marked = next(number for number, line in enumerate(lines, 1) if number > begin and "# here" in line)
    assert (error.where.file, error.where.line) == (mixed_rows.__file__, marked)
    assert error.fix
