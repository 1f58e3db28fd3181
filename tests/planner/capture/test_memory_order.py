"""Calls that name places in memory become views of tensors, equal on every layout, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from passes.errors import PlanError
from planner.capture.inferred_rules import infer_rules
from planner.capture.memory_order import OF_MEMORY, views_for_memory
from tests.tools.captures import program_again
from tests.tools.examples import examples
from tests.tools.simulated_mesh import equals_one_process, run_mesh
from tests.tools.simulated_ranks import built

aten = torch.ops.aten
WIDTH, LENGTH, HEADS = 16, 16, 2

# ---- one call


Step = tuple[Any, ...]  # an op, and its arguments after the tensor


def graph_of(x: Tensor, *steps: Step) -> fx.GraphModule:
    """One step after another, from x."""
    graph = fx.Graph()
    at = _placeholder(graph, x)
    for target, *args in steps:
        at = _call(graph, target, at, *args)
    graph.output(at)
    return fx.GraphModule(nn.Module(), graph)


def _placeholder(graph: fx.Graph, x: Tensor) -> fx.Node:
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return node


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def assert_equal(x: Tensor, *steps: Step) -> list[str]:
    """The ops that took the place of the last step."""
    module = graph_of(x, *steps)
    views_for_memory(module)
    assert not [n for n in module.graph.nodes if n.target in OF_MEMORY]
    leaf = x.clone().requires_grad_()
    found, expected = fx.Interpreter(module).run(leaf), leaf
    for target, *args in steps:
        expected = target(expected, *args)
    assert found.equal(expected)
    pulled = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(y, leaf, pulled, materialize_grads=True)[0] for y in (found, expected))
    torch.testing.assert_close(ours, theirs)
    return [n.target._opname for n in list(module.graph.nodes)[len(steps) : -1]]


TWICE = (aten.mul.Tensor, 2)


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], bool, list[int], list[int], int | None]:
    """Sizes of a tensor, an order of its dims, whether half of it is read, and a layout within its memory."""
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)))
    order = tuple(draw(st.permutations(range(len(sizes)))))
    strides = torch.empty(sizes).permute(order).stride()
    steps = st.sampled_from([0, *strides, *strides, *(2 * s for s in strides), sum(strides[:2])])
    asked = draw(st.lists(st.tuples(st.integers(1, 4), steps), min_size=1, max_size=4))
    start = draw(st.one_of(st.none(), st.integers(0, 5)))
    return sizes, order, draw(st.booleans()), [n for n, _ in asked], [s for _, s in asked], start


@examples(200)
@given(layouts())
def test_any_layout_is_a_view_of_the_tensor_or_is_refused(case: Any) -> None:
    sizes, order, is_half, asked, strides, start = case
    x = torch.randn(sizes, dtype=torch.float64)
    if (start or 0) + sum((n - 1) * s for n, s in zip(asked, strides, strict=True)) >= x.numel():
        return
    half = [(aten.slice.Tensor, -1, 0, max(1, sizes[order[-1]] // 2))] if is_half else []
    views = [(aten.permute.default, list(order)), *half]
    try:
        assert_equal(x, TWICE, *views, (aten.as_strided.default, asked, strides, start))
    except PlanError:
        inside = torch.zeros(sizes)
        part = inside
        for target, *args in views:
            part = target(part, *args)
        part.fill_(1)
        assert not inside.as_strided(asked, strides, start or 0).all()  # it reads beyond its operand


def test_a_dim_stays_a_dim_where_nothing_moves_across_it() -> None:
    x = torch.randn(1, 4, 8, 6, dtype=torch.float64)
    strided = (aten.as_strided.default, [1, 4, 3, 4, 6], [192, 48, 12, 6, 1])
    assert assert_equal(x, TWICE, strided) == ["unfold", "permute"]


def test_chunks_that_overlap_are_windows_of_the_joined_dims() -> None:
    x = torch.randn(3, 2, 8, 5, dtype=torch.float64)
    strided = (aten.as_strided.default, [3, 3, 8, 5], [80, 20, 5, 1])
    assert assert_equal(x, TWICE, strided) == ["view", "unfold", "permute"]


def test_a_band_is_a_diagonal_of_windows() -> None:
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    ops = assert_equal(x, TWICE, (aten.as_strided.default, [2, 6, 3], [48, 9, 1]))
    assert ops[:2] == ["unfold", "diagonal"]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.as_strided_scatter.default, (torch.empty(2, 3, device="meta"), [2, 3], [6, 1])),
        (aten.resize_.default, ([9, 9],)),
    ],
)
def test_others_are_refused(target: Any, args: tuple[Any, ...]) -> None:
    graph = fx.Graph()
    x = _call(graph, aten.mul.Tensor, _placeholder(graph, torch.empty(6, 6)), 1)
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = torch.empty(9, 9, device="meta")
    graph.output(node)
    with pytest.raises(PlanError):
        views_for_memory(fx.GraphModule(nn.Module(), graph))


# ---- whole models


class Mixed(nn.Module):
    """One block that mixes tokens by ``mix``."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding, self.values = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out, self.head, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32), mix

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.out(self.mix(self.values(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def windows_of_heads(x: Tensor) -> Tensor:
    b, t, _ = x.shape
    z = x.view(b, t, HEADS, -1).transpose(1, 2)
    s = z.stride()
    w = z.as_strided((b, HEADS, t // 2 - 1, 4, WIDTH // HEADS), (s[0], s[1], 2 * s[2], s[2], s[3]))
    return F.pad(w.mean(3).repeat_interleave(2, 2), (0, 0, 1, 1)).transpose(1, 2).flatten(2)


def chunks_of_batch_and_heads(x: Tensor) -> Tensor:
    b, t, _ = x.shape
    z = x.view(b, t, HEADS, -1).transpose(1, 2).reshape(b * HEADS, t // 8, 8, -1)
    size, stride = list(z.shape), list(z.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    y = F.pad(z.as_strided(size, stride).mean(2), (0, 0, 0, 1)).repeat_interleave(4, 1)
    return y.view(b, HEADS, t, -1).transpose(1, 2).flatten(2)


def written_rows(x: Tensor) -> Tensor:
    b, t, c = x.shape
    y = x * 1
    before = y.as_strided((b, t - 1, 2, c), (t * c, c, c, 1))
    y.as_strided((b, t // 2, c), (t * c, 2 * c, 1)).mul_(2)
    return y + F.pad(before.sum(2), (0, 0, 1, 0))


def another_memory(x: Tensor) -> Tensor:
    b, t, c = x.shape
    y = torch.empty(0, dtype=x.dtype)
    y.set_(x.detach())
    z = x * 1
    z.as_strided_((b, t, HEADS, c // HEADS), (t * c, c, c // HEADS, 1))
    return y + z.flatten(2) * (x.transpose(1, 2).stride(1) / c + z.is_contiguous())


MIXES = (windows_of_heads, chunks_of_batch_and_heads, written_rows, another_memory)
LAYOUTS: tuple[Any, ...] = ({"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2})


@pytest.mark.sampled(2)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_every_layout_reads_the_same_elements(mix: Callable[[Tensor], Tensor], mesh: dict[str, int]) -> None:
    assert_trains_as_one_process(mix, mesh)


def assert_trains_as_one_process(mix: Callable[[Tensor], Tensor], mesh: dict[str, int]) -> None:
    ids = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch, cut = {"ids": ids, "labels": ids.roll(1)}, {"sequence_parallel": "tp" in mesh, "vocabulary_multiple": 8}
    equals_one_process(lambda: built(lambda: Mixed(mix)), batch, mesh, each=(1e-8, 1e-12), tensor_parallel=cut)


def beyond(x: Tensor) -> Tensor:
    first, _ = x.chunk(2, -1)
    return first.as_strided(x.shape, x.stride())


def every_row_alone(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row.as_strided((LENGTH, WIDTH), (WIDTH, 1)))(x)


def shared_positions(x: Tensor) -> Tensor:
    y = x * 1
    y.unfold(1, 4, 2).mul_(2)
    return y


def of_a_storage(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=x.dtype).set_(x.detach().untyped_storage(), 0, x.shape) + x


def by_address(x: Tensor) -> Tensor:
    return x if x.data_ptr() % 2 == 0 else 2 * x


# ---- ops and Functions of the user's, which run as they are


def _as_if_contiguous(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) * 2


@torch.library.custom_op("meshwright_memory::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Twice the elements in the order of memory, as a kernel computes that knows no strides."""
    return _as_if_contiguous(x)


@torch.library.custom_op("meshwright_memory::widened", mutates_args=())
def widened(x: Tensor, size: list[int]) -> Tensor:
    return x.unsqueeze(-1).expand(size).clone()


doubled.register_fake(lambda x: torch.empty(x.shape, dtype=x.dtype, device=x.device))
doubled.register_autograd(lambda ctx, g: g * 2)
widened.register_fake(lambda x, size: x.new_empty(size))
widened.register_autograd(lambda ctx, g: (g.sum(-1), None))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _as_if_contiguous(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3  # not the derivative: the Function stays one call


def in_order(x: Tensor) -> Tensor:
    return doubled(x)


def function_in_order(x: Tensor) -> Tensor:
    return Doubled.apply(x)  # pyright: ignore[reportReturnType]


def of_a_size(x: Tensor) -> Tensor:
    return widened(x.sin(), [*x.shape, 3]).mean(-1)


def transposed(x: Tensor) -> Tensor:
    return doubled(x.transpose(1, 2)).transpose(1, 2)


def function_transposed(x: Tensor) -> Tensor:
    return Doubled.apply(x.transpose(1, 2)).transpose(1, 2)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.sampled(1)
@pytest.mark.covering(1)
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("mix", [in_order, function_in_order, of_a_size])
def test_own_ops_get_the_memory_and_the_sizes_of_their_trial(mix: Any, mesh: dict[str, int]) -> None:
    assert_trains_as_one_process(mix, mesh)


def test_what_reads_contiguous_memory_gets_it_from_any_tensor() -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    x, y = torch.randn(2, WIDTH, LENGTH).transpose(1, 2), torch.randn(2, LENGTH, WIDTH)
    for mix, of in ((in_order, {"doubled"}), (function_in_order, {"Doubled"})):
        program = program_again(Mixed(mix), {"ids": ids, "labels": ids})
        infer_rules(program)
        (call,) = [n for n in program.graph.graph.nodes if getattr(n.target, "__name__", "").split(".")[0] in of]
        run: Any = call.target
        if mix is in_order:
            (laid_out,) = call.all_input_nodes
            run = lambda z, after=laid_out.target, then=call.target: then(after(z))  # noqa: E731
        assert run(x).equal(2 * x)
        assert run(y).equal(2 * y)


REFUSED = {
    transposed: "doubled.default depends on the strides of its arguments",
    function_transposed: "Doubled depends on the strides of its arguments",
    beyond: "as_strided reads memory beyond its operand",
    every_row_alone: "as_strided is not supported within torch.vmap",
    shared_positions: "a write in place into windows",
    of_a_storage: "cannot be captured",
    by_address: "Cannot access data pointer",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("mix", "what"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_a_reader_of_memory_is_refused_at_its_line(mix: Callable[[Tensor], Tensor], what: str) -> None:
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    with pytest.raises(PlanError, match=what) as caught:
        run_mesh(lambda: Mixed(mix), {"ids": ids, "labels": ids}, {"tp": 2})
    assert "test_memory_order.py" in str(caught.value)
