"""The typings that planner/placement/rules give, beside those that follow from the factors of the table of rules.

    EACH    its places are sharded, and the result      a factor of the operands alone cannot be: it is in the result
    SUM     its places are sharded, the result is P
    MIX     none

Every call of captured models over tp 2, with the plain cut of every dim of its operands and of its result under
discussion. A difference is one that stands in JUDGED, with the reason, or the test fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, fx

from planner.graph.ops.aten import shape_of
from planner.placement.rules.forms import Form
from planner.placement.rules.table import Option, Site, has_rule, options_of
from planner.placement.types import P, Placement, R, V
from planner.rules.call import operands_of
from planner.rules.rule import RESULT, Factor, Role
from planner.rules.table import rule_of
from tests.models import plannable
from tests.models.hugging_face import ZOO, batch
from tests.models.hugging_face import build as build_zoo
from tests.tools.captures import captured_again, program_again

TP = 2
Typing = tuple[tuple[Placement, ...], Placement]

EXCHANGED = "the dim is mixed: ranks exchange statistics of their parts, a parallel form of this op alone"
SCALED = "the dim is mixed: a mean of parts is no sum of parts until each is scaled by its length"
NOT_ASKED = "right, and of no use to placement: it is a dim of the batch or of tokens, which tp leaves whole"
JUDGED: dict[tuple[str, str], str] = {
    ("softmax.int", "only of placement: OVER_RANKS"): EXCHANGED,
    ("log_softmax.int", "only of placement: OVER_RANKS"): EXCHANGED,
    ("logsumexp.default", "only of placement: OVER_RANKS"): EXCHANGED,
    ("layer_norm.default", "only of placement: OVER_RANKS"): EXCHANGED,
    ("mean.dim", "only of placement: MEAN"): SCALED,
    ("mean.default", "only of placement: MEAN"): SCALED,
    ("embedding.default", "only of placement: VOCABULARY"): "rows are mixed: ids of other ranks' rows are masked",
    ("cross_entropy_loss.default", "only of placement: CLASSES"): "losses have no rule yet",
    ("gather.default", "only of placement: PICKED"): "the dim is mixed: one rank holds the element, others give zeros",
    ("slice.Tensor", "only of placement: STRIDED"): "positions of a slice are not kept: by its bounds and step alone",
    ("scaled_dot_product_attention.default", "only of factors"): "right, and seldom wise: each rank makes all scores",
    ("conv1d.default", "only of factors"): NOT_ASKED,
    ("conv2d.default", "only of factors"): NOT_ASKED,
    ("index_select.default", "only of factors"): NOT_ASKED,
    ("index.Tensor", "only of factors"): NOT_ASKED,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(plannable.MODELS))
def test_typings_of_factors_are_those_of_the_rules_of_placement(name: str) -> None:
    graph = captured_again(plannable.build(name), plannable.spec_of(name, mesh={"tp": 2})).program().graph.graph
    assert not _unjudged(graph)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ZOO)
def test_so_are_those_of_families_of_transformers(name: str) -> None:
    assert not _unjudged(program_again(build_zoo(name), batch(name)).graph.graph)


def _unjudged(graph: fx.Graph) -> dict[tuple[str, str], str]:
    return {key: where for node in graph.nodes for key, where in _differences(node) if key not in JUDGED}


def _differences(node: fx.Node) -> Iterator[tuple[tuple[str, str], str]]:
    """(op, kind of difference) and the call."""
    if node.op != "call_function" or not isinstance(node.meta["val"], Tensor) or not has_rule(node.target):
        return
    if any(not isinstance(n.meta["val"], Tensor) for n in node.all_input_nodes):
        return
    by_rules, by_factors = set(_of_placement(node)), set(_of_factors(node))
    where = f"{node.format_node()} {[shape_of(n) for n in node.all_input_nodes]} -> {shape_of(node)}"
    op = str(node.target).removeprefix("aten.")
    forms = dict(_of_placement_with_forms(node))
    for typing in sorted(by_rules - by_factors, key=str):
        yield (op, f"only of placement: {forms[typing].name}"), f"{_text(typing)}  {where}"
    for typing in sorted(by_factors - by_rules, key=str):
        yield (op, "only of factors"), f"{_text(typing)}  {where}"


def _text(typing: Typing) -> str:
    return f"{', '.join(map(str, typing[0]))} -> {typing[1]}"


def _of_placement(node: fx.Node) -> Iterator[Typing]:
    yield from (typing for typing, _ in _of_placement_with_forms(node))


def _of_placement_with_forms(node: fx.Node) -> Iterator[tuple[Typing, Form]]:
    """Those of plain cuts; partial sums as an input follow from an op that is linear, and are no factor."""
    values = {n.name: n for n in (*node.all_input_nodes, node)}
    cuts = {name: {V(d, s) for d, s in enumerate(shape_of(n)) if s % TP == 0} for name, n in values.items()}
    for option in options_of(Site(node, TP, cuts)):
        if option.form not in (Form.WHOLE, Form.PARTIAL) and all(map(_is_plain, (*option.args, option.out))):
            yield _without_gradients(option), option.form


def _is_plain(placement: Placement) -> bool:
    return not placement.is_sharded or (len(placement.segments) == 1 and not placement.padding)


def _without_gradients(option: Option) -> Typing:
    """Without a gradient R is I."""
    plain = tuple(t if t.is_sharded or t == P else R for t in (*option.args, option.out))
    return plain[:-1], plain[-1]


def _of_factors(node: fx.Node) -> Iterator[Typing]:
    rule, operands = rule_of(node), operands_of(node)
    for factor in rule.factors if rule is not None else ():
        if factor.role is Role.MIX or factor.size % TP:
            continue
        places = {p.operand: _cut(factor, p.operand, node, operands) for p in factor.places}
        if None in places.values() or (factor.role is Role.EACH and RESULT not in places):
            continue
        given: dict[fx.Node, set[Any]] = {}
        for i, operand in enumerate(operands):
            given.setdefault(operand, set()).add(places.get(i, R))
        if all(len(types) == 1 for types in given.values()):
            args = tuple(given[n].pop() for n in node.all_input_nodes)
            yield args, places.get(RESULT, P)  # pyright: ignore[reportReturnType]


def _cut(factor: Factor, operand: int, node: fx.Node, operands: tuple[fx.Node, ...]) -> Placement | None:
    """The plain cut of a dim, of which a factor is the outermost."""
    place = factor.at(operand)
    assert place is not None
    size = shape_of(node if operand == RESULT else operands[operand])[place.dim]
    return V(place.dim, size) if place.inner * factor.size == size else None
