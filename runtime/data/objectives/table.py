"""The objectives by their names in the spec."""

from __future__ import annotations

from passes.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.masked import masked
from runtime.data.objectives.next_token import next_token
from runtime.data.objectives.protocol import ALL, NO_ROLES, Make, Objective, Roles, Within
from runtime.data.tokens import Tokens

OBJECTIVES: dict[str, Make] = {"next_token": next_token, "masked": masked}


def make_objective(
    tokens: Tokens, length: int, data: DataSpec, seed: int, roles: Roles = NO_ROLES, within: Within = ALL
) -> Objective:
    """The objective that the section asks for. Raises PlanError if the tokens do not serve it.

    ``roles``: those that the model reads. ``within``: sizes of the documents to take.
    """
    if tokens.is_supervised and data.objective != "next_token":
        what = f"{tokens.source} has samples with labels, and objective: {data.objective} chooses its own"
        raise PlanError(what, where="data.objective", fix="set objective: next_token")
    return OBJECTIVES[data.objective](tokens, length, data, seed, roles, within)
