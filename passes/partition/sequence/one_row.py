"""The types of a program along its sequence when one row of it is computed at a time, in order.

    V(dim)   of each sequence the rows at one position       R   of all positions, computed anew or kept so far

They are those of cp with one token on each rank, from the inputs to the logits. A value that cp gathers (keys and
values of attention) is kept here: earlier rows of it were computed before. Values that cp replicates (positions, masks,
tables, ids) are known in full, and a row of them is a slice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from passes.errors import PlanError
from passes.moe.sorting import Sorted
from passes.partition.loss.scored import Scored
from passes.partition.sequence.facts import Types
from passes.partition.sequence.refusals import op
from passes.partition.sequence.types import types_of
from passes.program.ops.aten import shape_of
from passes.program.ops.groups import MOVED
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import operands, walk

CP = "cp: "
FIX = "nothing: every token runs the whole forward"


@dataclass(frozen=True)
class OneRow:
    """``logits``: of all positions, before the loss moves or casts them; its last dim is the vocabulary. ``dtype``: in
    which the loss reads them. ``needed``: the values that they are made of. ``length``: positions of a sequence."""

    types: Types
    logits: fx.Node
    dtype: torch.dtype
    needed: frozenset[fx.Node]
    length: int

    @property
    def precision(self) -> float:
        """The largest eps of the dtypes in which the logits are computed."""
        dtypes = {
            value.meta["val"].dtype for value in self.types.natives if isinstance(value.meta["val"], torch.Tensor)
        }
        return max((torch.finfo(dtype).eps for dtype in {*dtypes, self.dtype} if dtype.is_floating_point), default=0.0)


def one_row(program: Program, scored: Scored) -> OneRow:
    """Raises PlanError, with the op and its line, if rows of the logits need more than kept rows of earlier values."""
    logits, dtype = _logits_of(program, scored)
    (length,) = {shape_of(program.node(n))[1] for n, key in program.inputs.items() if key == scored.key}
    types = Types(1, length, cuts_again=False)
    try:
        types_of(program, types, Sorted(), [logits])
    except PlanError as error:
        raise PlanError(error.what.removeprefix(CP), where=error.where, fix=FIX) from error
    native = types.of(logits)
    if not native.is_sharded or types.lengths != {length} or native.dim == len(shape_of(logits)) - 1:
        raise refused(logits, "its rows are not those of one sequence")
    return OneRow(types, logits, dtype, frozenset(walk([logits], operands)), length)


def refused(node: fx.Node, why: str) -> PlanError:
    return PlanError(f"{op(node)}: {why}", where=where_of(node), fix=FIX)


def _logits_of(program: Program, scored: Scored) -> tuple[fx.Node, torch.dtype]:
    """The logits that all look-ups of the loss move or cast, and the dtype in which they read them."""
    found = set[tuple[fx.Node, torch.dtype]]()
    for pick in scored.picks:
        node = program.node(pick.node).all_input_nodes[0]
        dtype = node.meta["val"].dtype
        while node.target in MOVED:
            node = node.all_input_nodes[0]
        found.add((node, dtype))
    if len(found) != 1 or shape_of(next(iter(found))[0])[-1] != scored.num_classes:
        raise refused(program.node(scored.picks[0].node), "the loss reads several logits, or not all classes of them")
    return found.pop()
