"""This rank's parameters as its stages hold them."""

from __future__ import annotations

from torch import Tensor

from runtime import Engine
from runtime.engine.build import parameters_of


def own_parameters(engine: Engine) -> dict[str, Tensor]:
    """By dotted name; of a tied weight's copies any, they are equal."""
    return {local.fqn: parameter.data for local, parameter in parameters_of(engine.program)}
