"""How many addends of a value's gradient a call makes, one after the other.

x · x            2: each operand has one
rms_norm(x)      several: PyTorch writes it out as x · rsqrt(mean x²), and autograd sees those steps
layer_norm(x)    1: written out as one step
"""

from __future__ import annotations

import torch
from torch import fx

from passes.program.ops.aten import ops_named, packet_of

SEVERAL = 2
_ONE_STEP = set(
    map(
        packet_of,
        ops_named(
            "linear matmul einsum conv1d conv2d conv3d reshape contiguous to.dtype expand_as pad layer_norm "
            "softmax.int log_softmax.int cross_entropy_loss scaled_dot_product_attention dropout where.ScalarOther"
        ),
    )
)


def num_addends(reader: fx.Node, value: fx.Node) -> int:
    """The number of times that the call names the value; twice that if PyTorch makes several steps of the call."""
    named: list[fx.Node] = []
    fx.map_arg((reader.args, reader.kwargs), lambda node: named.append(node) or node)
    return named.count(value) * (SEVERAL if _is_written_out(reader.target) else 1)


def _is_written_out(target: object) -> bool:
    """Whether an op has no derivative of its own: a few are then one step that has."""
    if not isinstance(target, torch._ops.OpOverload) or packet_of(target) in _ONE_STEP:
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
