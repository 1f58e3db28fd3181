"""Every op of a captured model with every sharded typing under discussion, on the values that it meets there."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from passes.blocks.blocks import find_blocks
from passes.partition.typings.table import Option
from passes.peephole import place
from passes.program.program import Program
from planner.capture.export import capture
from planner.placement.candidates import Candidates, Cutting
from planner.placement.decide import _edges
from tests.tools.simulated_ranks import Op, check

META = torch.device("meta")


class _Recorder(fx.Interpreter):
    """Runs a captured graph in float64 on the CPU and keeps what every node made."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.graph)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = self.values[n.name] = super().run_node(n)
        return value


def record(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Program, dict[str, Any]]:
    """The program of ``model`` in float64 throughout, and the value of every node."""
    program = capture(model, inputs, dtype=torch.float64)
    for node in program.graph.graph.nodes:
        node.args, node.kwargs = (_on_cpu(a) for a in (node.args, node.kwargs))
    program.graph.recompile()
    recorder = _Recorder(program)
    with torch.no_grad(), _double_by_default():
        recorder.run(*(_given(program, model, inputs, n) for n in program.graph.graph.find_nodes(op="placeholder")))
    for node in program.graph.graph.nodes:
        if node.op != "output":
            node.meta["val"] = recorder.values[node.name]
    return program, recorder.values


@contextmanager
def _double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def gradients(
    model: nn.Module, inputs: dict[str, Tensor], *, change: Callable[[Program], None] = lambda _: None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the captured graph, run whole, and its gradients by the user's parameter names. ``change``: made to
    the program before."""
    program = capture(model, inputs)
    change(program)
    given = {
        n.name: _placeholder(program, model, inputs, n.name) for n in program.graph.graph.find_nodes(op="placeholder")
    }
    place(program.graph.graph, torch.device("cpu"))
    program.graph.recompile()
    leaves = {name: given[name].requires_grad_() for name in program.parameters}
    (loss,) = program.graph(*given.values())
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return loss.detach(), {program.parameters[name]: g for name, g in zip(leaves, found, strict=True)}


def _placeholder(program: Program, model: nn.Module, inputs: dict[str, Tensor], name: str) -> Tensor:
    if name in program.inputs:
        return inputs[program.inputs[name]]
    if name in program.parameters:
        return model.get_parameter(program.parameters[name]).detach().clone()
    return model.get_buffer(program.buffers[name]) if name in program.buffers else program.constants[name]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        items = {k: _on_cpu(v) for k, v in pairs}
        return items if isinstance(value, dict) else type(value)(items.values())
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return torch.float64 if value in (torch.float32, torch.bfloat16, torch.float16) else value


def _given(program: Program, model: nn.Module, inputs: dict[str, Tensor], node: fx.Node) -> Tensor:
    """In float64; parameters with noise, so that none is zero or one by initialisation."""
    value = _placeholder(program, model, inputs, node.name)
    if node.name in program.parameters:
        value = value + 0.1 * torch.randn_like(value)
    return value.double() if value.is_floating_point() else value


def discussed(program: Program, tp: int) -> Iterator[tuple[fx.Node, Option, Option | None]]:
    """Each op (one of each kind of block) with each option that is not simply whole, and that of the tuple it is of."""
    nodes = [n for n in program.graph.graph.nodes if n.op != "output"]
    blocks = find_blocks(program)
    rep = {n.name: blocks.representative.get(n.name, n.name) for n in nodes}
    _, producers, readers = _edges(program, nodes, rep, {})
    candidates = Candidates([n for n in nodes if rep[n.name] == n.name], Cutting(tp), producers, readers)
    for node in candidates.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            for option in (o for o in candidates.options[node.name] if not o.whole):
                if node.target is not operator.getitem:
                    yield node, option, None
                else:
                    tuples = candidates.options[rep[node.all_input_nodes[0].name]]
                    yield from ((node, option, t) for t in tuples if t.out == option.args[0])


def signature(node: fx.Node, option: Option, source: Option | None, tp: int) -> tuple[Any, ...]:
    """Equal for calls that a check would treat alike."""
    chain = [node.all_input_nodes[0], node] if node.target is operator.getitem else [node]
    inputs = chain[0].all_input_nodes
    shapes = tuple((tuple(n.meta["val"].shape), n.meta["val"].dtype, n.meta["grad"]) for n in inputs)
    args = tuple(
        str(fx.map_arg((n.args, n.kwargs), lambda a: inputs.index(a) if a in inputs else "item")) for n in chain
    )
    return str(chain[0].target), args, shapes, option, source, tp


def disturbed(value: Any, grad: bool) -> Any:
    """Values as the model has them, but none zero by initialisation and none infinite where a gradient flows."""
    if not (isinstance(value, Tensor) and value.is_floating_point() and grad):
        return value
    noise = torch.randn_like(value)
    moved = torch.where(value == 0, 0.1 * noise, value * (1 + 0.1 * noise.clamp(-2, 2)))
    return torch.where(moved.isfinite(), moved, noise)


def check_model(model: nn.Module, inputs: dict[str, Tensor], *tps: int, seen: set[Any] | None = None) -> list[str]:
    """What is wrong under each tp, a line each (empty: nothing); ``seen`` leaves out what another model had alike."""
    torch.manual_seed(0)
    seen = set() if seen is None else seen
    program, values = record(model, inputs)
    return [line for tp in tps for line in _wrong(program, values, tp, seen)]


def _wrong(program: Program, values: dict[str, Any], tp: int, seen: set[Any]) -> list[str]:
    wrong, checked = [], 0
    for node, option, source in discussed(program, tp):
        key = signature(node, option, source, tp)
        if key in seen:
            continue
        seen.add(key)
        op = Op(node, values)
        op.values = {n.name: disturbed(values[n.name], n.meta["grad"]) for n in op.inputs}
        checked += 1
        try:
            check(op, option, tp, source=source)
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            wrong.append(
                f"{node.name}: {key[0]}{key[1]} on {[k[0] for k in key[2]]}, {option.form.value} "
                f"{list(map(str, option.args))} -> {option.out}: {type(error).__name__} {said}"
            )
    assert checked or tp == 1 or seen, "nothing was checked"
    return wrong
