"""The rule table: a small file a family of ops, each with the ops that it covers; this file joins them."""

from typing import Any

from torch import fx

from passes.partition.typings import experts, layout, products, reduction
from passes.partition.typings.base import Form, Option, Rule, Site, by_factors, own_backward
from passes.program.ops.aten import aten, draws, packet_of, packets
from passes.program.ops.groups import is_grouped
from passes.program.ops.own_backward import OwnBackward
from passes.rules.own import own_rule
from passes.rules.table import builder_of

FAMILIES = (experts, layout, products, reduction)


COVERED = tuple(covers for family in FAMILIES for covers in family.COVERS)
RULES: dict[Any, Rule] = {}
for covers in COVERED:
    for op in covers.ops():
        assert RULES.setdefault(op, covers.rule) is covers.rule, f"{op} has two rules"
GIVES: dict[Rule, frozenset[Form]] = {covers.rule: frozenset(covers.gives) for covers in COVERED}
WITH_SIZES = packets("view _unsafe_view unflatten", ())  # their arguments are sizes; a captured graph has reshape
ANY_OP = frozenset({Form.WHOLE, Form.PARTIAL})


def forms_of(rule: Rule) -> frozenset[Form]:
    """Return all forms that a rule may give."""
    return ANY_OP | GIVES.get(rule, frozenset({Form.PARTS}))


def rule_of(node: fx.Node) -> Rule | None:
    """Return the rule of a call; None if there is none (it is then computed in full on every rank, and reported)."""
    return products.contraction if "inferred" in node.meta else rule_of_op(node.target)


def rule_of_op(target: Any) -> Rule | None:
    """Return the rule that an op has, however it is called."""
    if target in RULES:
        return RULES[target]
    if isinstance(target, OwnBackward):
        return own_backward if target.facts.cuts else None
    if is_grouped(target) or own_rule(target) is not None:
        return products.contraction
    is_left_out = packet_of(target) in WITH_SIZES or (draws(target) and target is not aten.dropout.default)
    return by_factors if builder_of(target) is not None and not is_left_out else None


def has_rule(target: Any) -> bool:
    return rule_of_op(target) is not None


def options_of(site: Site) -> list[Option]:
    """Return every admissible typing of a node, the replicated ones first; in a fixed order, none twice."""
    rule = rule_of(site.node)
    if rule is not None and site.node.target in experts.BORDERS:
        return list(rule(site))  # of one type on either side, whatever the others
    options = dict.fromkeys(site.uniform())
    if rule is not None and site.inputs and site.tp > 1:
        found = [o for o in rule(site) if site.grad(site.node) or o.form is not Form.PARTIAL]
        assert all(o.form in forms_of(rule) for o in found), f"{rule} gave a form that GIVES does not list"
        options |= dict.fromkeys(found)
    return list(options)
