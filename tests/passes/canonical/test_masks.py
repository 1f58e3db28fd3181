"""Masks that say nothing new are dropped, all others stay; either way attention gives the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.canonical.masks import simplify_masks
from passes.peephole import place
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
