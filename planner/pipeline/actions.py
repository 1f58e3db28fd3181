"""Pipeline actions: one rank runs a sequence of them in each step.

    F3.1   forward of microbatch 3 on chunk 1
    B3.1   its backward; if the schedule has W, only the gradients of the stage's inputs
    W3.1   its weight gradients, from tensors that B3.1 kept for it

A schedule has a W for every B, or no W: then B computes all gradients. (B and W of Qi et al. 2023, "Zero Bubble
Pipeline Parallelism", section 2.)
"""

from collections.abc import Iterable
from typing import NamedTuple


class Action(NamedTuple):
    """Forward ("F"), backward ("B") or weight gradients ("W") of one microbatch on one chunk of a rank."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}"


Order = tuple[Action, ...]


def format_order(order: Order) -> str:
    """Return the text of an order: ``F0.0 F1.0 B0.0 …``."""
    return " ".join(map(str, order))


def has_weights(orders: Iterable[Order]) -> bool:
    return any(action.kind == "W" for order in orders for action in order)


def without_weights(order: Order) -> Order:
    """Return the order without its W: a W sends nothing, and CUDA graphs do not capture it."""
    return tuple(action for action in order if action.kind != "W")


def needs(kind: str, microbatch: int, stage: int, num_stages: int) -> list[tuple[str, int, int]]:
    """Return the dependencies of an action, on any rank: (kind, microbatch, stage) of each."""
    if kind == "F":
        return [("F", microbatch, stage - 1)] if stage else []
    if kind == "W":
        return [("B", microbatch, stage)]
    after = [("B", microbatch, stage + 1)] if stage + 1 < num_stages else []
    return [("F", microbatch, stage), *after]


def too_early(order: Order) -> Action | None:
    """Return the first W that precedes its B, or None."""
    done = set[tuple[int, int]]()
    for action in order:
        if action.kind == "B":
            done.add(action[1:])
        elif action.kind == "W" and action[1:] not in done:
            return action
    return None
