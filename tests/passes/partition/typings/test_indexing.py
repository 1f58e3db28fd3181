"""Rules of indexing, padding and convolution: every admitted typing against the op on whole tensors."""

import pytest
import torch
from hypothesis import strategies as st

from tests.tools.random_ops import Weight, check_options, op_of, real, rule_property, sizes

pytestmark = pytest.mark.check

aten = torch.ops.aten


def ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


@rule_property
def test_index_with_one_or_two_tensors(data):
    shape = sizes(data.draw, data.draw(st.integers(1, 4)))
    used = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=2, unique=True))
    rows = sizes(data.draw, data.draw(st.integers(1, 2)))
    indices = [ids(n, *rows) if d in used else None for d, n in enumerate(shape)][: max(used) + 1]
    check_options(data, op_of(aten.index.Tensor, (real(*shape), indices)))


@rule_property
def test_gather(data):
    shape = sizes(data.draw, data.draw(st.integers(1, 3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    smaller = [n if data.draw(st.booleans()) else max(1, n - 1) for n in shape]
    smaller[dim] = data.draw(st.sampled_from([4, 6, 1]))
    check_options(data, op_of(aten.gather.default, (real(*shape), dim, ids(shape[dim], *smaller))))


@rule_property
def test_scatter_and_scatter_add(data):
    shape = sizes(data.draw, data.draw(st.integers(1, 3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    some = list(shape)
    some[dim] = data.draw(st.integers(1, shape[dim]))
    index = torch.stack([torch.randperm(shape[dim])[: some[dim]] for _ in range(max(1, sum(shape)))])[0]
    index = index.reshape([-1 if d == dim % len(shape) else 1 for d in range(len(shape))]).expand(some).contiguous()
    target = data.draw(st.sampled_from([aten.scatter.src, aten.scatter.value, aten.scatter_add.default]))
    last = 2.0 if target is aten.scatter.value else real(*some)
    check_options(data, op_of(target, (real(*shape), dim, index, last)))


@rule_property
def test_index_add_and_index_put(data):
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(-3, 2))
    count = data.draw(st.integers(1, 4))
    index = torch.randperm(shape[dim])[:count]
    some = [len(index) if d == dim % 3 else n for d, n in enumerate(shape)]
    if data.draw(st.booleans()):
        check_options(data, op_of(aten.index_add.default, (real(*shape), dim, index, real(*some))))
    else:
        rows = torch.randperm(shape[0])[:count]
        accumulate = data.draw(st.booleans())
        values = real(len(rows), *shape[1:]) if data.draw(st.booleans()) else real(*shape[1:])
        check_options(data, op_of(aten.index_put.default, (real(*shape), [rows], values, accumulate)))


@rule_property
def test_pad_tril_cumsum_roll_unfold_one_hot(data):
    shape = sizes(data.draw, 3)
    dim = data.draw(st.integers(-3, 2))
    x = real(*shape)
    calls = [
        (aten.pad.default, (x, [1, 0, 0, 2], "constant", data.draw(st.sampled_from([None, 0.0, 1.0])))),
        (aten.constant_pad_nd.default, (x, [0, 0, 1, 1], 0.0)),
        (aten.tril.default, (x, 1)),
        (aten.triu.default, (x,)),
        (aten.cumsum.default, (x, dim)),
        (aten.roll.default, (x, [1], [dim])),
        (aten.flip.default, (x, [dim])),
        (aten.unfold.default, (x, dim, 1, 1)),
        (aten.one_hot.default, (ids(5, *shape), 5)),
    ]
    check_options(data, op_of(*data.draw(st.sampled_from(calls))))


@rule_property
def test_complex_rotations(data):
    b, s, h, d = sizes(data.draw, 4)
    form = data.draw(st.integers(0, 2))
    pairs = real(b, s, h, d, 2)
    if form == 0:
        check_options(data, op_of(aten.view_as_complex.default, (pairs,)))
    elif form == 1:
        values = torch.view_as_complex(pairs.detach()).requires_grad_()
        check_options(data, op_of(aten.view_as_real.default, (values,)))
    else:
        values = torch.view_as_complex(pairs.detach()).requires_grad_()
        angles = torch.polar(torch.ones(1, s, 1, d, dtype=torch.float64), torch.rand(1, s, 1, d, dtype=torch.float64))
        check_options(data, op_of(aten.mul.Tensor, (values, angles)))


@rule_property
def test_every_other_element(data):
    shape, dim = sizes(data.draw, 3), data.draw(st.integers(0, 2))
    shape[dim] *= data.draw(st.sampled_from([2, 3, 4]))
    step = data.draw(st.integers(2, 3))
    start = data.draw(st.integers(0, step - 1))
    size = shape[dim]
    end = start + ((size - start - 1) // step) * step + 1 if size > start else size
    check_options(data, op_of(aten.slice.Tensor, (real(*shape), dim, min(start, size), end, step)))


@rule_property
def test_convolutions(data):
    channels, out = data.draw(st.sampled_from([2, 4, 6, 12])), data.draw(st.sampled_from([2, 4, 8, 12]))
    batch = [2] if data.draw(st.booleans()) else []
    form = data.draw(st.integers(0, 3))
    stride, space = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([4, 6]))
    if form == 0:
        args = (real(*batch, channels, space, space), Weight(real(out, channels, 2, 2)), None, [stride] * 2)
        check_options(data, op_of(aten.conv2d.default, args))
    elif form == 1:
        args = (real(*batch, channels, space), Weight(real(out, channels, 3)), None, [stride], [1])
        check_options(data, op_of(aten.conv1d.default, args))
    elif form == 2:
        args = (real(*batch, channels, space), Weight(real(channels, 1, 3)), None, [1], [2], [1], channels)
        check_options(data, op_of(aten.conv1d.default, args))
    else:
        args = (real(2, 12, space), Weight(real(12, 3, 2)), None, [1], [0], [1], False, [0], 4)
        check_options(data, op_of(aten.convolution.default, args))


@rule_property
def test_pooling_and_group_norm(data):
    b, c, n = 2, data.draw(st.sampled_from([2, 4, 6, 12])), 4
    form = data.draw(st.integers(0, 2))
    if form == 0:
        check_options(data, op_of(aten.avg_pool2d.default, (real(b, c, n, n), [2, 2])))
    elif form == 1:
        check_options(data, op_of(aten.adaptive_avg_pool2d.default, (real(b, c, n, n), [2, 2])))
    else:
        groups = data.draw(st.sampled_from([g for g in (1, 2, 3, 4, 6) if c % g == 0]))
        w, b_ = Weight(real(c)), Weight(real(c))
        check_options(data, op_of(aten.group_norm.default, (real(b, c, n), groups, w, b_, 1e-5)))


@rule_property
def test_products_of_expert_groups(data):
    experts, rows, i, o = 3, 6, *(data.draw(st.sampled_from([4, 6, 8, 12])) for _ in range(2))
    import transformers.integrations.moe  # noqa: F401 - defines the op

    offsets = torch.tensor([2, 2, rows], dtype=torch.int32)
    target = torch.ops.transformers.grouped_mm_fallback.default
    check_options(data, op_of(target, (real(rows, i), Weight(real(experts, i, o)), offsets)))
