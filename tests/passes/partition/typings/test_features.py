"""Rules of pointwise ops, reductions, ops along a dim and norms: every admitted typing against the whole op."""

import pytest
import torch
from hypothesis import strategies as st

from passes.partition.typings.base import Form
from passes.partition.typings.table import Site, options_of
from tests.tools.random_ops import Weight, check_options, op_of, real, rule_property, sizes

pytestmark = pytest.mark.check

aten = torch.ops.aten


def broadcast_pair(draw):
    out = sizes(draw, draw(st.integers(0, 3)))
    pair = [[n if draw(st.booleans()) else 1 for n in out][draw(st.integers(0, len(out))) :] for _ in range(2)]
    return real(*pair[0]), real(*pair[1])


BINARY = [
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.maximum.default,
    aten.rsub.Tensor,
    aten.pow.Tensor_Tensor,
    aten.lt.Tensor,
    aten.logaddexp.default,
    aten.atan2.default,
]


@rule_property
def test_binary_pointwise_with_broadcasting(data):
    a, b = broadcast_pair(data.draw)
    target = data.draw(st.sampled_from(BINARY))
    if target is aten.pow.Tensor_Tensor:
        a = a.detach().abs().requires_grad_()
    kwargs = {"alpha": 2} if target in (aten.add.Tensor, aten.sub.Tensor) and data.draw(st.booleans()) else {}
    b = Weight(b) if data.draw(st.booleans()) else b
    check_options(data, op_of(target, (a, b), kwargs))


UNARY = [
    (aten.gelu.default, ()),
    (aten.silu.default, ()),
    (aten.tanh.default, ()),
    (aten.neg.default, ()),
    (aten.mul.Scalar, (3.0,)),
    (aten.div.Tensor, (2.0,)),
    (aten.add.Tensor, (1.0,)),
    (aten.rsub.Scalar, (1.0,)),
    (aten.pow.Tensor_Scalar, (2,)),
    (aten.clone.default, ()),
    (aten.to.dtype, (torch.float64,)),
    (aten.relu.default, ()),
    (aten.leaky_relu.default, (0.1,)),
    (aten.clamp.default, (-1.0, 1.0)),
    (aten.sigmoid.default, ()),
    (aten.detach.default, ()),
    (aten.softplus.default, ()),
    (aten.mul.Tensor, (0.5,)),
    (aten.zeros_like.default, ()),
    (aten.ones_like.default, ()),
    (aten.cos.default, ()),
    (aten.exp.default, ()),
    (aten.contiguous.default, ()),
    (aten.dropout.default, (0.0, True)),
    (aten.sub.Tensor, (1.0,)),
    (aten.div.Tensor_mode, (2.0,)),
]


@rule_property
def test_unary_pointwise(data):
    target, rest = data.draw(st.sampled_from(UNARY))
    kwargs = {"rounding_mode": None} if target is aten.div.Tensor_mode else {}
    check_options(data, op_of(target, (real(*sizes(data.draw, data.draw(st.integers(0, 3)))), *rest), kwargs))


def test_a_cast_to_fewer_bits_takes_no_partial_sums():
    """Each rank would round its part, and the sum of rounded parts is not the rounded sum."""
    wide, narrow = (op_of(aten.to.dtype, (real(4, 4).to(a), b)) for a, b in NARROWING)
    kinds = [{o.form for o in options_of(Site(op.node, 2, {}))} for op in (wide, narrow)]
    assert kinds == [{Form.WHOLE, Form.PARTIAL}, {Form.WHOLE}]


NARROWING = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))


@rule_property
def test_where_and_masked_fill(data):
    a, b = broadcast_pair(data.draw)
    mask = torch.rand(sizes(data.draw, 0) or a.shape) > 0.5
    form = data.draw(st.integers(0, 3))
    if form == 0:
        check_options(data, op_of(aten.where.self, (mask, a, b)))
    elif form == 1:
        check_options(data, op_of(aten.masked_fill.Scalar, (a, mask, -5.0)))
    elif form == 2:
        check_options(data, op_of(aten.where.ScalarOther, (mask, a, 0.0)))
    else:
        check_options(data, op_of(aten.where.ScalarSelf, (mask, data.draw(st.sampled_from([0.0, 1.0])), b)))


REDUCTIONS = [
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.linalg_vector_norm.default,
    aten.var.correction,
    aten.std.correction,
    aten.norm.ScalarOpt_dim,
    aten.prod.dim_int,
    aten.argmax.default,
    aten.any.dim,
]


@rule_property
def test_reductions(data):
    target = data.draw(st.sampled_from(REDUCTIONS))
    shape = sizes(data.draw, data.draw(st.integers(1, 3)))
    x = real(*shape, grad=data.draw(st.booleans()))
    dims = data.draw(st.sets(st.integers(-len(shape), len(shape) - 1), min_size=1))
    dims = list({d % len(shape): d for d in dims}.values())
    keepdim = data.draw(st.booleans())
    if target in (aten.prod.dim_int, aten.argmax.default, aten.any.dim):
        args = (x.detach() > 0 if target is aten.any.dim else x, dims[0], keepdim)
    elif target is aten.linalg_vector_norm.default or target is aten.norm.ScalarOpt_dim:
        args = (x, 2, dims, keepdim)
    elif target in (aten.var.correction, aten.std.correction):
        check_options(data, op_of(target, (x, dims), {"correction": 0, "keepdim": keepdim}))
        return
    else:
        args = (x, dims, keepdim)
    check_options(data, op_of(target, args))


@rule_property
def test_reductions_to_a_scalar(data):
    target = data.draw(
        st.sampled_from(
            [aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.linalg_vector_norm.default]
        )
    )
    check_options(data, op_of(target, (real(*sizes(data.draw, data.draw(st.integers(0, 3)))),)))


ALONG = [
    (aten.softmax.int, (), None),
    (aten.log_softmax.int, (), None),
    (aten.cumsum.default, (), None),
    (aten._softmax.default, (False,), None),
    (aten.max.dim, (), 0),
    (aten.min.dim, (True,), 1),
    (aten.median.dim, (), 0),
    (aten.sort.default, (), 0),
    (aten.argsort.default, (), None),
]


@rule_property
def test_ops_along_a_dim(data):
    target, rest, item = data.draw(st.sampled_from(ALONG))
    shape = sizes(data.draw, data.draw(st.integers(1, 3)))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    check_options(data, op_of(target, (real(*shape), dim, *rest), item=item))


@rule_property
def test_topk_flip_roll(data):
    shape = sizes(data.draw, 3)
    dim = data.draw(st.integers(-3, 2))
    form = data.draw(st.integers(0, 4))
    if form == 0:
        check_options(data, op_of(aten.topk.default, (real(*shape), 1, dim), item=data.draw(st.integers(0, 1))))
    elif form == 1:
        check_options(data, op_of(aten.flip.default, (real(*shape), [dim])))
    elif form == 2:
        check_options(data, op_of(aten.roll.default, (real(*shape), [1], [dim])))
    elif form == 3:
        check_options(data, op_of(aten.roll.default, (real(*shape), [1])))
    else:
        check_options(data, op_of(aten.topk.default, (real(*shape), 1), item=0))


@rule_property
def test_norms(data):
    shape = sizes(data.draw, data.draw(st.integers(1, 4)))
    last = shape[-data.draw(st.integers(1, len(shape))) :]
    w, b = (Weight(real(*last)) if data.draw(st.booleans()) else None for _ in range(2))
    if data.draw(st.booleans()):
        check_options(data, op_of(aten.layer_norm.default, (real(*shape), last, w, b, 1e-5)))
    else:
        check_options(data, op_of(aten.rms_norm.default, (real(*shape), last, w)))
