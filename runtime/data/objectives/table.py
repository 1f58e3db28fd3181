"""The objectives by their names in the spec."""

from __future__ import annotations

from planner.errors import PlanError
from planner.spec.data import DataSpec
from runtime.data.objectives.next_token import next_token
from runtime.data.objectives.protocol import Make, Objective
from runtime.data.tokens import Tokens

OBJECTIVES: dict[str, Make] = {"next_token": next_token}


def make_objective(tokens: Tokens, length: int, data: DataSpec, seed: int) -> Objective:
    """The objective that the section asks for. Raises PlanError where the tokens do not serve it."""
    if data.objective not in OBJECTIVES:
        what = f"data.objective: {data.objective} is not there yet"
        raise PlanError(what, where="data.objective", fix=f"write {' or '.join(OBJECTIVES)}")
    return OBJECTIVES[data.objective](tokens, length, data, seed)
