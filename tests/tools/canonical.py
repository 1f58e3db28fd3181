"""A body or a loss in canonical form, as text: what capture makes of it, once it was seen to compute the same."""

from collections.abc import Callable

from torch import Tensor, fx

from passes.base import text_of
from passes.program.program import Program
from planner.capture.export import capture
from tests.models.one_body import Body, OneBody, assert_capture_equals, batch


class OneLoss(OneBody):
    """The logits [b, s, classes] and the labels go to ``loss``."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda _, x: x)
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.embed(ids)), labels)


def canonical(body: Body) -> str:
    """The calls from the features ``x`` to the head, a line each."""
    names, calls = _compared(OneBody(body))
    last = next(i for i, node in enumerate(calls) if "head.weight" in map(names.get, node.all_input_nodes))
    return _text(names, calls[0], calls[1:last], "x")


def canonical_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> str:
    """The calls that follow the head's product without bias, ``logits``, a line each."""
    names, calls = _compared(OneLoss(loss))
    last = next(i for i, node in enumerate(calls) if "head.weight" in map(names.get, node.all_input_nodes))
    return _text(names, calls[last + 1], calls[last + 2 :], "logits")


def _compared(model: OneBody) -> tuple[dict[fx.Node, str], list[fx.Node]]:
    assert_capture_equals(model)
    program = capture(model, batch())
    return _names(program), [n for n in program.graph.graph.nodes if n.op == "call_function"]


def _names(program: Program) -> dict[fx.Node, str]:
    given = program.parameters | program.inputs | program.buffers
    return {n: str(given.get(n.name, n.name)) for n in program.graph.graph.find_nodes(op="placeholder")}


def _text(names: dict[fx.Node, str], first: fx.Node, calls: list[fx.Node], called: str) -> str:
    """Values are named by their place, as names of nodes follow torch's release."""
    names = names | {first: called} | {node: f"v{i}" for i, node in enumerate(calls)}
    return "".join(text_of(node, lambda n: names[n]) + "\n" for node in calls)
