"""The collectives between types: each turns a value and its gradient from one type into another."""

import json
from random import Random

import pytest
import torch
from torch import Tensor

from passes.ops import collectives
from passes.ops.axis import AxisHandle
from passes.types.conversions import TABLE, conversion
from passes.types.types import I, P, Placement, R, Segment, V
from tests.tools.paths import ORACLES
from tests.tools.random_ops import random_cut
from tests.tools.ranks import Ranks
from tests.tools.simulated_ranks import assert_typed, parts

pytestmark = pytest.mark.check

ORACLE = json.loads((ORACLES / "tp_numeric.json").read_text())["mappings_by_tp"]
SHAPE = (4, 12, 24)
KINDS = {"I": I, "R": R, "P": P}


def run(
    name: str, given: list[Tensor], pulled: list[Tensor], cut: Placement | None, other: Placement | None = None
) -> list[tuple[Tensor, Tensor, AxisHandle]]:
    """Each rank's result, the gradient of its input, and its axis with the counts."""
    tp = len(given)
    more = (cut, other) if other is not None else (cut,) if name in collectives.TAKES_CUT else ()

    def rank_of(rank: int) -> tuple[Tensor, Tensor, AxisHandle]:
        axis = AxisHandle("tp", tp, rank)
        mine = given[rank].detach().clone().requires_grad_()
        out = collectives.BY_NAME[name](mine, axis, *more)
        (gradient,) = torch.autograd.grad(out, mine, pulled[rank])
        return out.detach(), gradient, axis

    return Ranks(tp).run(rank_of)


def cuts(tp: int, *, whole_segments: bool = False) -> list[Placement]:
    """Cuts of SHAPE, some of several segments; where asked for, some of these are whole on each rank."""
    random = Random(tp)
    found = [random_cut(random, SHAPE, tp) for _ in range(12)]
    whole = [Placement("V", d, (Segment(n),)) for d, n in enumerate(SHAPE) if n % tp == 0]
    padded = [V(0, 4, padding=-4 % tp), V(1, 12, padding=2 * tp - 12 % tp), V(2, 8, 16, padding=5 * tp - 16 % tp)]
    padded = [c for c in padded if c.padding and all(n % tp == 0 for n in c.sizes[:-1])]
    return whole + padded + [c for c in found if c is not None and c.has_whole_segment <= whole_segments]


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("before", "after"), [kinds for kinds in TABLE if kinds != ("V", "V")], ids=lambda kind: kind)
def test_a_conversion_carries_value_and_gradient_from_type_to_type(before, after, tp):
    only_taken = (before, after) == ("R", "V")
    for cut in cuts(tp, whole_segments=only_taken) if "V" in (before, after) else [None]:
        source, target = KINDS.get(before, cut), KINDS.get(after, cut)
        how = conversion(source, target, grad=True, parameter=False)
        assert how is not None
        generator = torch.Generator().manual_seed(0)
        x, pulled = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
        ran = run(
            how.name,
            parts(x, source, tp, generator, gradient=False),
            parts(pulled, target, tp, generator, gradient=True),
            cut,
        )
        assert_typed([out for out, _, _ in ran], x, target, gradient=False, what=how.name)
        assert_typed([g for _, g, _ in ran], pulled, source, gradient=True, what=f"gradient of {how.name}")
        promised = {(kind, phase): 1 for kind, phase in ((how.forward, "forward"), (how.backward, "backward")) if kind}
        assert all(dict(axis.counts) == promised for _, _, axis in ran)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("before", "after"), [(V(1, 12), V(0, 4)), (V(0, 4), V(2, 8, 16)), (V(2, 8, 16), V(1, 4, 8)), (V(2, 24), V(1, 12))]
)
def test_an_exchange_carries_a_cut_from_dim_to_dim(before, after, tp):
    how = conversion(before, after, grad=True, parameter=False, exchange=True)
    assert how is not None
    generator = torch.Generator().manual_seed(0)
    x, pulled = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    given = parts(x, before, tp, generator, gradient=False)
    ran = run(how.name, given, parts(pulled, after, tp, generator, gradient=True), before, after)
    assert_typed([out for out, _, _ in ran], x, after, gradient=False, what="exchange")
    assert_typed([g for _, g, _ in ran], pulled, before, gradient=True, what="gradient of an exchange")
    assert all(dict(a.counts) == {("all_to_all", p): 1 for p in ("forward", "backward")} for _, _, a in ran)


def test_only_what_is_made_of_weights_is_exchanged_and_no_weight_itself():
    cuts = V(1, 12), V(0, 4)
    assert conversion(*cuts, grad=True, parameter=False) is None
    assert conversion(*cuts, grad=True, parameter=True, exchange=True) is None
    assert conversion(V(1, 12), V(1, 4, 8), grad=True, parameter=False, exchange=True) is None


def test_a_noncontiguous_tensor_is_added_up_right():
    x = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    ran = run("g", [x.t(), 10 * x.t()], [torch.ones(6, 4, dtype=torch.float64)] * 2, None)
    assert all(torch.equal(out, 11 * x.t()) for out, _, _ in ran)


def test_collectives_leave_their_input_as_it_was():
    given = [torch.ones(3), torch.ones(3)]

    def rank_of(rank: int) -> None:
        collectives.g(given[rank], AxisHandle("tp", 2, rank))

    Ranks(2).run(rank_of)
    assert all(torch.equal(x, torch.ones(3)) for x in given)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Placement("V", 0, (Segment(4), Segment(1, sharded=False))), R),
        (P, Placement("V", 0, (Segment(4), Segment(1, sharded=False)))),
    ],
    ids=["whole segment", "to a whole segment"],
)
def test_uneven_cuts_are_never_converted(before, after):
    assert conversion(before, after, grad=True, parameter=False) is None


def test_a_part_with_whole_segments_is_taken_where_no_gradient_must_be_gathered():
    cut = Placement("V", 0, (Segment(4), Segment(1, sharded=False)))
    assert conversion(I, cut, grad=True, parameter=False) is None
    for before, grad in ((R, True), (R, False), (I, False)):
        how = conversion(before, cut, grad=grad, parameter=False)
        assert how is not None
        assert not how.forward + how.backward


def test_a_parameter_is_never_gathered_or_sliced():
    assert conversion(V(0, 8), R, grad=True, parameter=True) is None
    assert conversion(I, V(0, 8), grad=True, parameter=True) is None
    assert conversion(R, V(0, 7, padding=1), grad=True, parameter=True) is None
    assert conversion(I, R, grad=True, parameter=True) is not None


def test_without_a_gradient_only_the_forward_is_paid_for():
    assert conversion(I, R, grad=False, parameter=False).backward == ""  # pyright: ignore[reportOptionalMemberAccess]
    assert conversion(I, V(0, 8), grad=False, parameter=False).backward == ""  # pyright: ignore[reportOptionalMemberAccess]


# the reference's name → our conversion, and the dim that it cuts
MAPPINGS = {
    "copy_to_tensor_model_parallel_region": ("f", None),
    "reduce_from_tensor_model_parallel_region": ("g", None),
    "scatter_to_tensor_model_parallel_region": ("slice", 1),
    "gather_from_tensor_model_parallel_region": ("collect", 1),
    "scatter_to_sequence_parallel_region": ("slice", 0),
    "gather_from_sequence_parallel_region": ("gather", 0),
}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MAPPINGS)
def test_the_reference_s_mappings(name, tp):
    ours, dim = MAPPINGS[name]
    rows = ORACLE[str(tp)][name]
    read = {key: [torch.tensor(row[key], dtype=torch.float64) for row in rows] for key in rows[0]}
    if ours == "f":  # the reference adds up in place, so its record holds the sum; every mapping was given the same
        other = ORACLE[str(tp)]["reduce_from_tensor_model_parallel_region"]
        read["grad_output"] = [torch.tensor(row["grad_output"], dtype=torch.float64) for row in other]
    whole = read["input"][0].shape if ours == "slice" else read["output"][0].shape
    cut = V(dim, whole[dim]) if dim is not None else None
    ran = run(ours, read["input"], read["grad_output"], cut)
    for (out, gradient, _), expected, expected_gradient in zip(ran, read["output"], read["grad_input"], strict=True):
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(gradient, expected_gradient)
