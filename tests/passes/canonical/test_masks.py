"""Masks that say nothing new are dropped, all others stay; what each row of a mask allows, or nothing is claimed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from passes.canonical.masks import MaskRows, Runs, simplify_masks
from passes.peephole import place
from passes.program.known_values import Constants
from passes.program.program import Program
from planner.capture.export import capture
from tests.models.one_body import LENGTH, OneBody, batch

aten = torch.ops.aten
Mask = Callable[[Tensor], Tensor]


def ones() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool)


def added(allowed: Tensor, low: float = float("-inf")) -> Tensor:
    return torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~allowed, low)


CAUSAL: dict[str, Mask] = {
    "lower triangle": lambda _: ones().tril(),
    "positions compared": lambda _: torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH)[None, :],
    "minus infinity above": lambda _: added(ones().tril()),
    "the lowest number above": lambda _: added(ones().tril(), torch.finfo(torch.float64).min),
    "one for each sequence": lambda _: ones().tril().expand(2, 1, LENGTH, LENGTH),
}
FULL: dict[str, Mask] = {
    "all allowed": lambda _: ones(),
    "zeros added": lambda _: added(ones()),
}
STAYS: dict[str, Mask] = {
    "a band": lambda _: ones().tril() & ones().triu(-2),
    "the other triangle": lambda _: ones().triu(),
    "a number above that is not low enough": lambda _: added(ones().tril(), -10.0),
    "a bias by distance": lambda _: added(ones().tril()) - torch.arange(LENGTH, dtype=torch.float64),
    "of the batch": lambda x: (x.detach().sum((1, 2)) > 0).view(2, 1, 1, 1) | ones().tril(),
    "causal but for one sequence": lambda _: torch.stack([ones().tril(), ones()]).unsqueeze(1),
}


def attended(mask: Mask, **options: bool) -> OneBody:
    def body(m: OneBody, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (x, m.up(x), x.sin()))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask(x), **options)
        return mixed.transpose(1, 2).flatten(2)

    return OneBody(body)


def simplified(mask: Mask) -> tuple[Program, torch.fx.Node]:
    """The program, and its one call of attention; the loss is compared with that of the model itself."""
    model = attended(mask)
    program = capture(model, batch())
    simplify_masks(program)
    place(program.graph.graph, torch.device("cpu"))
    program.graph.recompile()
    values = {name: model.get_parameter(fqn) for name, fqn in program.parameters.items()} | program.constants
    values |= {name: batch()[key] for name, key in program.inputs.items()}
    holders = program.graph.graph.find_nodes(op="placeholder")
    torch.testing.assert_close(program.graph(*(values[n.name] for n in holders))[0], model(**batch()))
    (call,) = program.graph.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return program, call


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_becomes_is_causal(name):
    program, call = simplified(CAUSAL[name])
    assert call.args[3:] == (None, 0.0, True)
    assert [what for what, _ in program.rewrites] == ["the attention mask is causal"]
    assert {n.target for n in program.graph.graph.nodes} & {aten.tril.default, aten.ge.Tensor} == set()


@pytest.mark.parametrize("name", FULL)
def test_a_full_mask_goes_away(name):
    program, call = simplified(FULL[name])
    assert call.args[3:] == (None, 0.0, False)
    assert [what for what, _ in program.rewrites] == ["the attention mask is full"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STAYS)
def test_a_mask_that_says_something_stays(name):
    program, call = simplified(STAYS[name])
    assert isinstance(call.args[3], torch.fx.Node)
    assert program.rewrites == []


def test_a_rewrite_names_the_line_of_the_module_that_attends():
    (rewrite,) = simplified(CAUSAL["lower triangle"])[0].rewrites
    assert str(rewrite[1]).startswith("one_body.py:")


# ---- what each row of a mask allows, without the mask: the same as the mask says, or nothing is claimed


OfPlaces = Callable[[Tensor, Tensor], Tensor]  # of the places of queries [s, 1] and of keys [1, s]

KNOWN: dict[str, OfPlaces] = {
    "causal": lambda q, k: k <= q,
    "causal, the other way round": lambda q, k: q >= k,
    "later ones": lambda q, k: q < k,
    "itself": lambda q, k: q == k,
    "a window": lambda q, k: (k <= q) & (k > q - 5),
    "a window by distance": lambda q, k: (q - k >= 0) & (q - k < 5),
    "not later ones": lambda q, k: ~(k > q),
    "documents that are one": lambda q, k: (q * 0 == k * 0) & (k <= q),
    "two documents": lambda q, k: (q // 8 == k // 8) & (k <= q),
    "a prefix for all": lambda q, k: (k < 6) | (k <= q),
    "some queries see nothing": lambda q, k: (q > 4) & (k <= q),
    "a triangle": lambda q, k: torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(1),
    "for each sequence": lambda q, k: (k <= q).expand(2, 1, len(q), k.shape[1]),
    "all": lambda q, k: (q >= 0).expand(len(q), k.shape[1]),
}
UNKNOWN: dict[str, OfPlaces] = {
    "every second one": lambda q, k: (k % 2 == 0) & (k <= q),
    "neither before nor behind": lambda q, k: ~((k > q) | (k < 4)),
    "a hole": lambda q, k: (k < 3) | (k > q),
    "no order among keys": lambda q, k: (k * 7 % 5) <= q,
    "by real numbers": lambda q, k: k.double() <= q.double(),
    "the other triangle": lambda q, k: torch.ones(len(q), k.shape[1], dtype=torch.bool).triu(),
}


class Attention(nn.Module):
    def __init__(self, mask: OfPlaces) -> None:
        super().__init__()
        self.up, self.mask = nn.Linear(8, 8), mask

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        h = self.up(x).unsqueeze(1)
        mask = self.mask(places[:, None], places[None, :])
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask).square().mean()


def captured(mask: OfPlaces, length: int) -> tuple[Program, torch.fx.Node]:
    program = capture(Attention(mask), {"x": torch.empty(2, length, 8, device="meta")})
    (attention,) = program.graph.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    return program, attention


def runs_of(mask: OfPlaces, length: int) -> tuple[Runs | None, Tensor]:
    """What is known of the rows, and the mask."""
    program, attention = captured(mask, length)
    constants = Constants(program)
    value = constants.value(attention.args[3])  # pyright: ignore[reportArgumentType]
    assert value is not None
    return MaskRows(constants).of(attention.args[3]), value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("length", [3, 16])
@pytest.mark.parametrize("mask", KNOWN.values(), ids=KNOWN)
def test_runs_are_what_the_mask_allows(mask, length):
    runs, value = runs_of(mask, length)
    assert runs is not None
    places = torch.arange(length)
    allowed = (places >= runs.first[:, None]) & (places < runs.stop[:, None])
    assert torch.equal(allowed.expand(value.shape), value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mask", UNKNOWN.values(), ids=UNKNOWN)
def test_of_what_is_no_run_nothing_is_claimed(mask):
    runs, _ = runs_of(mask, 16)
    assert runs is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("length", [1 << 17, 1 << 20])
@pytest.mark.parametrize("name", ["causal", "documents that are one", "all", "a window", "two documents"])
def test_of_a_mask_too_large_to_compute_it_is_known_whether_it_says_anything(name, length):
    program, attention = captured(KNOWN[name], length)
    simplify_masks(program)
    is_causal = len(attention.args) > 5 and attention.args[5]
    says = attention.args[3] is not None
    assert (says, is_causal) == {"all": (False, False), "a window": (True, False), "two documents": (True, False)}.get(
        name, (False, True)
    )
