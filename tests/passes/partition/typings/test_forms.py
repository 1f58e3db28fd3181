"""Every form that a rule can give has a lowering that is right, for each op that it can be given for."""

from typing import Any

import pytest
import torch

from passes.localize import OVER_TP, STATISTICS
from passes.partition.typings.base import Form, by_factors, own_backward
from passes.partition.typings.table import GIVES, RULES, Site, forms_of, options_of
from passes.partition.writer import REWRITES, SAME_OP
from passes.program.ops.aten import op_named
from passes.program.ops.sequence import causal_attention
from passes.types.types import Placement, V
from tests.tools.random_ops import op_of, real
from tests.tools.simulated_ranks import check

pytestmark = pytest.mark.check

ON_RANKS_OF_CP = {(causal_attention, Form.SHARED_KEYS)}  # tests/passes/ops/test_context.py runs it
PAIRS = {(op, form) for op, rule in RULES.items() for form in forms_of(rule) - SAME_OP}


def image(ndim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weight of a depthwise convolution of 4 channels."""
    return real(2, 4, *[5] * ndim), real(4, 1, *[3] * ndim)


def convolved(ndim: int, padding: Any) -> tuple[Any, ...]:
    return (*image(ndim), None, [1] * ndim, padding, [1] * ndim, 4)


def labels(size: int) -> torch.Tensor:
    return torch.arange(6) % size


def heads(num: int) -> torch.Tensor:
    return real(2, num, 3, 5)


# (op, form): arguments, and a cut under discussion for one of the tensors
EXAMPLES: dict[tuple[str, Form], tuple[tuple[Any, ...], int, Placement]] = {
    ("reshape", Form.SIZES): ((real(3, 4, 5), [3, 20]), 0, V(1, 4)),
    ("expand", Form.SIZES): ((real(4, 1), [4, 3]), 0, V(0, 4)),
    ("split_with_sizes", Form.SPLIT): ((real(3, 12), [4, 8], 1), 0, V(1, 4, 8)),
    ("slice.Tensor", Form.SEGMENT): ((real(3, 12), 1, 4, 12), 0, V(1, 4, 8)),
    ("slice.Tensor", Form.STRIDED): ((real(3, 12), 1, 1, 12, 3), 0, V(1, 12)),
    ("mean", Form.MEAN): ((real(4, 3),), 0, V(0, 4)),
    ("mean.dim", Form.MEAN): ((real(4, 3), [0]), 0, V(0, 4)),
    ("embedding", Form.VOCABULARY): ((real(8, 3), labels(8)), 0, V(0, 8)),
    ("cross_entropy_loss", Form.CLASSES): ((real(6, 8), labels(8)), 0, V(1, 8)),
    ("logsumexp", Form.OVER_RANKS): ((real(3, 4), [1]), 0, V(1, 4)),
    ("softmax.int", Form.OVER_RANKS): ((real(3, 4), 1), 0, V(1, 4)),
    ("log_softmax.int", Form.OVER_RANKS): ((real(3, 4), 1), 0, V(1, 4)),
    ("layer_norm", Form.OVER_RANKS): ((real(3, 4), [4], real(4), real(4)), 0, V(1, 4)),
    ("rms_norm", Form.OVER_RANKS): ((real(3, 4), [4], real(4)), 0, V(1, 4)),
    ("linalg_vector_norm", Form.OVER_RANKS): ((real(3, 4, 2), 2, [1, 2], True), 0, V(1, 4)),
    ("amax", Form.OVER_RANKS): ((real(3, 4, grad=False), [1]), 0, V(1, 4)),
    ("amin", Form.OVER_RANKS): ((real(3, 4, grad=False), [1]), 0, V(1, 4)),
    ("gather", Form.PICKED): ((real(6, 4), 1, labels(4)[:, None]), 0, V(1, 4)),
    ("scaled_dot_product_attention", Form.SHARED_KEYS): ((heads(4), heads(1), heads(1)), 0, V(1, 4)),
    ("conv1d", Form.GROUPS): (convolved(1, [1]), 0, V(1, 4)),
    ("conv2d", Form.GROUPS): (convolved(2, [1, 1]), 0, V(1, 4)),
    ("conv3d", Form.GROUPS): (convolved(3, [1, 1, 1]), 0, V(1, 4)),
    ("conv1d.padding", Form.GROUPS): (convolved(1, "same"), 0, V(1, 4)),
    ("conv2d.padding", Form.GROUPS): (convolved(2, "same"), 0, V(1, 4)),
    ("conv3d.padding", Form.GROUPS): (convolved(3, "same"), 0, V(1, 4)),
    ("convolution", Form.GROUPS): ((*image(1), None, [1], [1], [1], False, [0], 4), 0, V(1, 4)),
    ("group_norm", Form.GROUPS): ((real(2, 4, 5), 2, real(4), real(4)), 0, V(1, 4)),
}


def test_every_form_is_the_same_op_or_has_one_lowering():
    assert set(REWRITES) | set(OVER_TP) | SAME_OP == set(Form)
    assert len(REWRITES) + len(OVER_TP) + len(SAME_OP) == len(Form)


def test_every_form_is_given_by_some_rule():
    assert {form for rule in (*RULES.values(), by_factors, own_backward) for form in forms_of(rule)} == set(Form)
    assert set(GIVES) <= set(RULES.values())


def test_every_op_that_exchanges_statistics_has_its_lowering():
    over_ranks = {op for op, form in PAIRS if form in (Form.OVER_RANKS, Form.PICKED)}
    assert over_ranks == set(STATISTICS)


def test_every_op_has_an_example_of_every_form_that_is_spelled_anew():
    """So the test below leaves none out."""
    assert {(op_named(name), form) for name, form in EXAMPLES} == PAIRS - ON_RANKS_OF_CP


@pytest.mark.parametrize(("name", "form"), EXAMPLES, ids=str)
def test_the_lowering_of_a_form_gives_the_values_and_the_gradients_of_the_op(name: str, form: Form):
    torch.manual_seed(0)
    arguments, position, cut = EXAMPLES[name, form]
    op = op_of(op_named(name), arguments, item=1 if form is Form.SPLIT else None)
    cuts = {op.inputs[position].name: {cut}}
    options = [o for o in options_of(Site(op.chain[0], 2, cuts)) if o.form is form]
    assert options
    for option in options:
        if len(op.chain) == 1:
            check(op, option, 2)
            continue
        cuts[op.chain[0].name] = {option.out}
        for item in (o for o in options_of(Site(op.node, 2, cuts)) if o.args == (option.out,)):
            check(op, item, 2, source=option)


def test_a_rule_that_gives_a_form_which_the_table_does_not_list_is_caught(monkeypatch: pytest.MonkeyPatch):
    op = op_of(op_named("mean.dim"), (real(4, 3), [0]))
    monkeypatch.setitem(GIVES, RULES[op.node.target], frozenset({Form.PARTS}))
    with pytest.raises(AssertionError, match="GIVES"):
        options_of(Site(op.node, 2, {"x0": {V(0, 4)}}))
