"""Losses of rows of classes: unreduced each row is by itself; a sum adds them up, and a mean mixes them.

cross_entropy(x [n, c, ..], y [n, ..])     c: mixed
"""

from __future__ import annotations

from passes.rules.call import Call
from passes.rules.factors import EACH, MIX, SUM, Factors
from passes.rules.rule import RESULT, OpRule

ROLES = (EACH, MIX, SUM)  # by ``reduction``: none, mean, sum


def of_rows(call: Call) -> OpRule:
    """cross_entropy_loss, nll_loss_nd; targets are class ids, or probabilities of the shape of x."""
    ndim, role = len(call.shapes[0]), ROLES[call.given["reduction"]]
    classes = 1 if ndim > 1 else 0
    factors, has_ids = Factors(call), len(call.shapes[1]) < ndim
    for dim in (d for d in range(ndim) if d != classes):
        row = dim - (dim > classes)
        factors.add(role, (0, dim), (1, row if has_ids else dim), *([(RESULT, row)] if role is EACH else []))
    if not has_ids:
        factors.add(MIX, (0, classes), (1, classes))
    return factors.done()
