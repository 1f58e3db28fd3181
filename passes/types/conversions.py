"""The allowed changes of type and their communication: every change of type over the tp axis is a named collective.

f       I → R    forward nothing, backward all-reduce          g       P → I    forward all-reduce, backward nothing
slice   I → V    forward slice, backward all-gather            slice   R → V    forward slice, backward nothing
gather  V → R    all-gather, backward reduce-scatter           gather  V → I    all-gather, backward slice
scatter P → V    reduce-scatter, backward all-gather           first   I → P    kept on rank 0, backward nothing
g f     P → R    all-reduce, backward all-reduce
exchange V → V   all-to-all, backward all-to-all: of values made of weights alone, from one dim to another
"""

from dataclasses import dataclass

from passes.errors import require
from passes.types.types import Placement

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a value changes type: the collectives it runs in the forward and in the backward ("" for none)."""

    name: str
    forward: str = ""
    backward: str = ""


TABLE: dict[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion("f", "", ALL_REDUCE),
    ("P", "I"): Conversion("g", ALL_REDUCE, ""),
    ("P", "R"): Conversion("g f", ALL_REDUCE, ALL_REDUCE),
    ("I", "V"): Conversion("slice", "", ALL_GATHER),
    ("R", "V"): Conversion("cut", "", ""),
    ("V", "R"): Conversion("gather", ALL_GATHER, REDUCE_SCATTER),
    ("V", "I"): Conversion("collect", ALL_GATHER, ""),
    ("P", "V"): Conversion("scatter", REDUCE_SCATTER, ALL_GATHER),
    ("I", "P"): Conversion("first", "", ""),
    ("V", "V"): Conversion("exchange", ALL_TO_ALL, ALL_TO_ALL),
}


def conversion(
    before: Placement, after: Placement, *, grad: bool, parameter: bool, exchange: bool = False
) -> Conversion | None:
    """The conversion between two types; None if there is none. ``exchange``: whether a cut may go to another dim.

    Without a gradient only the forward counts. A parameter is never gathered: it is held as its readers want it, and
    with the padding that they want.
    """
    if before == after:
        return Conversion("")
    found = TABLE.get((before.kind, after.kind))
    if found is None or not _possible(before, after, grad) or (found.name == "exchange" and not exchange):
        return None
    if parameter and (found.forward or found.name == "slice" or after.padding):
        return None
    return found if grad else Conversion(found.name, found.forward, "")


def _possible(before: Placement, after: Placement, grad: bool) -> bool:
    """Collectives move evenly sharded dims only: replicated segments have no single owner. Taking a part moves nothing.

    Padding comes with a cut and goes with it; from one dim to another it would have to do both at once.
    """
    if before.is_sharded and after.is_sharded:
        return before.dim != after.dim and before.is_disjoint and after.is_disjoint
    cut = before if before.is_sharded else after
    only_taken = after.is_sharded and (before.kind == "R" or (before.kind == "I" and not grad))
    return only_taken or not cut.has_whole_segment


PHASES = ("forward", "backward", "step")
PERIODS = ("microbatch", "step")


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """An exchange over ``axis``: ``count`` messages of ``bytes`` each on one rank, per microbatch or step.

    ``where``: the user's module and line; ``stage``: None if no single stage runs it; ``block``: the block it is in.
    ``again``: a forward collective that the backward's recomputation repeats.
    """

    kind: str
    axis: str
    phase: str
    where: str
    bytes: int
    count: int
    per: str
    stage: int | None = None
    block: str = ""
    again: bool = False

    def __post_init__(self) -> None:
        require(self.phase in PHASES, f"{self.kind} at {self.where} has the unknown phase {self.phase}")
        require(self.per in PERIODS, f"{self.kind} at {self.where} is counted per {self.per}")
        require(self.bytes >= 0 and self.count >= 0, f"{self.kind} at {self.where} has a negative size")
