"""Marks of values in the experts' domain, in ``node.meta["domain"]``: which axis types them, which dims are cut."""

from dataclasses import dataclass
from math import ceil

from torch import fx

from passes.types.types import Sizes


@dataclass(frozen=True, slots=True)
class Domain:
    """``experts``: the dim that counts the experts, sharded over ep; ``rows``: the dim with a length that depends on
    the routing; ``slots``: the dim of slots, with those of several ranks. ``axis``: over which values are typed; tp if
    every rank has all experts."""

    experts: int = -1
    rows: int = -1
    slots: int = -1
    axis: str = "etp"


ROWS, STACK = Domain(rows=0), Domain(experts=0)


def domain_of(node: fx.Node) -> Domain | None:
    """Return the mark of a value; None outside the domain."""
    return node.meta.get("domain")


def counts_rows(node: fx.Node) -> bool:
    """Return whether the length of a value's first dim, and of no other, follows the routing."""
    domain = domain_of(node)
    return domain is not None and domain.rows == 0


def axis_of(node: fx.Node) -> str:
    """Return the axis over which a value is typed."""
    domain = domain_of(node)
    return "tp" if domain is None else domain.axis


def in_domain(node: fx.Node, shape: tuple[int, ...], mesh: Sizes) -> tuple[int, ...]:
    """Return ``shape`` of a value with its experts sharded over ep, and the slots of all senders; rows stay."""
    domain = domain_of(node)
    if domain is None:
        return shape
    local = list(shape)
    if domain.experts >= 0:
        local[domain.experts] //= mesh.ep
    if domain.slots >= 0:
        local[domain.slots] = share_of_slots(local[domain.slots], mesh) * mesh.ep * mesh.etp
    return tuple(local)


def share_of_slots(slots: int, mesh: Sizes) -> int:
    """Return how many slots of an expert one rank sends, of those that all ranks of tp have."""
    return ceil(slots / mesh.tp)


def share_of_rows(node: fx.Node, mesh: Sizes) -> float:
    """Return the rows of a rank, as a part of those in the graph, if every expert gets equally many."""
    domain = domain_of(node)
    return 1.0 if domain is None or domain.rows < 0 else mesh.etp / mesh.tp
