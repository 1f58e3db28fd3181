"""The collectives of a call in each direction, and the products that they overlap.

f before products of weights     its sum runs beside the gradients of the weights (passes.ops.column_linear)
gather before them               gathered again beside the gradient of the value, reduce-scatter beside the weights'
everything else                  the rank waits
"""

from __future__ import annotations

from passes.blocks.places import Places
from passes.ops import meeting
from passes.types.collectives import CollectivePlan
from planner.cost.cut.kernels import Op, Size
from planner.cost.cut.units import Message
from planner.decisions import Decisions
from planner.exchanges.collectives import rows_of_call
from planner.mesh import BY_ROUTING
from planner.saved.trace import Call


class MessagesOf:
    """Of the calls of one program."""

    def __init__(self, decisions: Decisions, follows: set[str], micro: int) -> None:
        self.decisions, self.follows, self.micro, self.places = decisions, follows, micro, Places(decisions.blocks)

    def of(self, call: Call, stage: int, of_held: tuple[Op, ...]) -> tuple[list[Message], list[Message]]:
        """Forward, and backward. ``of_held``: the call's products that make gradients of weights."""
        forward, backward = list[Message](), list[Message]()
        for row in rows_of_call(self.decisions, call, stage, self.places):
            if row.phase == "forward":
                forward.append(self._message(row, call, ()))
            else:
                backward.append(self._message(row, call, of_held if call.changed is not None else ()))
        return forward, backward

    def again(self, call: Call, stage: int) -> list[Message]:
        """The collectives of a rerun of the call: those of its forward."""
        rows = rows_of_call(self.decisions, call, stage, self.places)
        return [self._message(row, call, ()) for row in rows if row.phase == "forward"]

    def _message(self, row: CollectivePlan, call: Call, beside: tuple[Op, ...]) -> Message:
        is_routed = row.axis in BY_ROUTING
        size = Size.of(row.bytes, self.micro, follows=call.name in self.follows or is_routed)
        if is_routed and call.node.target in meeting.MOVING:
            size = size.times(self.decisions.fullest)  # the others wait for the fullest rank
        return Message(row.kind, row.axis, size, beside)
