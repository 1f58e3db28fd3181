"""Lower one stage for one rank: captured graph → the module that it runs (planner.lower does so for a plan).

``extract`` cuts a stage out of the captured graph, at global shapes; then the passes run, in the order below. The
runner alone lints the graph and calls the checks that each pass ``leaves`` (passes/check.py). The changes of each pass,
for a reader, are removed and added lines, equal ones of repeated blocks once:

insert_collectives   44 → 49 nodes: + 2 collectives.f, + 2 collectives.g, + 1 self.tp; 4 changed
    2 ×  - linear = aten.linear(layer_norm, blocks_0_up_weight)
    2 ×  + f = collectives.f(layer_norm, tp)
    2 ×  + linear = aten.linear(f, blocks_0_up_weight)

A stage's attributes are parameters and buffers (on meta, filled by the runtime) and constants; ``meta["origin"]`` of
its nodes is the name in the captured graph. Its arguments and results: passes.base.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx, nn

from passes import check
from passes.attend_by_documents import attend_by_documents
from passes.base import LowerContext, Pass, PassError, StageGraph, StageModule, kind_of, text_of
from passes.dropout import name_streams
from passes.exchanges import exchange_rows, exchange_sequence, keep_own_tokens, note_choices
from passes.gather_weights import await_parameters, gather_weights
from passes.keep_rows import cut_to_row, keep_rows
from passes.localize import insert_collectives, localize
from passes.loss_head import add_loss_head
from passes.moe import exchange
from passes.moe.layers import expert_parts
from passes.ops.loss_head import LOG_P
from passes.own_linears import overlap_f, own_linears
from passes.parameters import LocalParameter
from passes.partition.type_changes import runs_here
from passes.parts import compile_pieces, cut_regions
from passes.peephole import drop_unread, fuse_bias, overwrite_logits, place_devices, sum_in_place
from passes.program.program import BoundaryPlan, Program, StageAssignment
from passes.recompute import recompute

# Up to the program of one rank, which planner.trace traces.
LOCAL: tuple[Pass, ...] = (
    Pass(insert_collectives, leaves=(check.readers_get_the_type_that_they_want,)),
    Pass(exchange_rows),
    Pass(exchange_sequence, leaves=(check.no_cp_placeholder_is_left,)),
    Pass(localize, leaves_slowly=(check.values_have_their_local_shape,)),
    Pass(keep_own_tokens),
    Pass(name_streams, leaves=(check.no_op_draws_from_the_default_generator,)),
    Pass(attend_by_documents),
    Pass(fuse_bias),
    Pass(sum_in_place),
    Pass(overwrite_logits),
    Pass(overlap_f),
    Pass(own_linears),
    Pass(place_devices, leaves=(check.no_op_names_another_device,)),
    Pass(drop_unread),
)
PASSES: tuple[Pass, ...] = (
    *LOCAL,
    Pass(note_choices),
    Pass(cut_regions, leaves=(check.regions_are_those_of_the_plan,)),
    Pass(compile_pieces, leaves=(check.pieces_are_those_of_the_plan,)),
    Pass(recompute),
    Pass(await_parameters, leaves=(check.parameters_are_awaited,)),
    Pass(gather_weights, leaves=(check.weights_are_whole,)),
)
_GRAPHS = (cut_regions, compile_pieces)
_ONLY_TRAINING = (note_choices, *_GRAPHS, recompute, await_parameters)


_OF_ONE_ROW = (name_streams, place_devices, drop_unread, gather_weights)


def _with(
    passes: tuple[Pass, ...], *added: Callable[[StageGraph, LowerContext], None], without: Collection[Any]
) -> tuple[Pass, ...]:
    """Return ``passes`` with ``added`` directly behind localize, and behind these none of ``without``."""
    at = [step.run for step in passes].index(localize) + 1
    return (*passes[:at], *map(Pass, added), *(step for step in passes[at:] if step.run not in without))


def with_head(passes: tuple[Pass, ...], want: str = "", *, keeps: bool = False) -> tuple[Pass, ...]:
    """``passes`` of a stage that returns ``want`` of its loss (passes.ops.loss_head), or ``keeps`` rows for generation.

    Nothing is captured, recomputed or awaited; for log-probabilities, from which a loss outside the model trains,
    nothing is captured or compiled.
    """
    added = [*[keep_rows] * keeps, *[add_loss_head(want)] * bool(want)]
    return _with(passes, *added, without=_GRAPHS if want == LOG_P else _ONLY_TRAINING)


# Any stage at one position of a sequence.
ONE_ROW = _with(PASSES, cut_to_row, without=[step.run for step in PASSES if step.run not in _OF_ONE_ROW])

Borders = tuple[tuple[BoundaryPlan, ...], tuple[BoundaryPlan, ...]]


def run_passes(
    stage: StageGraph,
    context: LowerContext,
    passes: tuple[Pass, ...] | None = None,
    seen: Callable[[str, StageGraph], None] | None = None,
) -> None:
    """The passes in their order, all if none are given; ``seen`` is shown the stage after each.

    Raises PassError if a pass does not leave a fact that it must.
    """
    for step in PASSES if passes is None else passes:
        step.run(stage, context)
        for fact in (check.is_sound, *step.leaves, *(step.leaves_slowly if context.thorough else ())):
            for violation in fact(stage, context):
                raise PassError(step.name, fact.__name__, stage.index, violation)
        if seen is not None:
            seen(step.name, stage)


def finish(
    context: LowerContext, stage: StageGraph, chunk: int, local: Callable[[str], LocalParameter], borders: Borders
) -> StageModule:
    """Return the module of a stage after its passes: parameters and buffers on meta, constants on the device.

    ``local``: this rank's part of a parameter; ``borders``: values received, sent.
    """
    program, device = context.lowering.program, context.device
    parameters = tuple(map(local, stage.parameters))
    for name, own in zip(stage.parameters, parameters, strict=True):
        empty = torch.empty(own.shape, dtype=own.dtype, device="meta")
        stage.root.register_parameter(name, nn.Parameter(empty, own.requires_grad))
    for name, buffer in list(stage.root.named_buffers()):
        if name not in stage.buffers:
            stage.root.register_buffer(name, buffer.to(device))
    module = fx.GraphModule(stage.root, stage.graph)
    attributes = {program.parameters[n]: n for n in stage.parameters} | {program.buffers[n]: n for n in stage.buffers}
    held = {n.target for n in stage.graph.nodes if n.op == "get_attr"}
    for handle in held:
        if isinstance(handle, str) and not isinstance(getattr(stage.root, handle), (torch.Tensor, nn.Module)):
            setattr(module, handle, getattr(stage.root, handle))
    return StageModule(
        stage.index,
        chunk,
        module,
        *borders,
        tuple(program.inputs[n] for n in stage.inputs),
        tuple(context.lowering.denominators.index(n) for n in stage.denominators),
        parameters,
        tuple(program.buffers[n] for n in stage.buffers),
        attributes,
        stage.has_loss,
        stage.has_scores,
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """A node as text. ``same``: equal for nodes of repeated blocks at the same place."""

    name: str
    kind: str
    text: str
    same: str


@dataclass
class Differences:
    """Is shown a stage's graph after each pass. Owns: how it was before, and the lines to print."""

    representative: Mapping[str, str]
    before: tuple[_Line, ...] | None = None
    lines: list[str] = field(default_factory=list)

    def seen(self, name: str, stage: StageGraph) -> None:
        after = tuple(map(self._line, stage.graph.nodes))
        if self.before is None:
            self.lines.append(f"  {name:<20} {len(after)} nodes")
        else:
            self.lines.append(f"  {name:<20} {_summary(self.before, after)}")
            self.lines += _folded(_changes(self.before, after))
        self.before = after

    def _line(self, node: fx.Node) -> _Line:
        return _Line(node.name, kind_of(node), text_of(node), text_of(node, self._place))

    def _place(self, node: fx.Node) -> str:
        origin = node.meta.get("origin", "")
        return f"{kind_of(node)}@{self.representative.get(origin, origin)}"


def _summary(before: tuple[_Line, ...], after: tuple[_Line, ...]) -> str:
    """Return how many nodes there are, which kinds came and went, and how many calls have other arguments."""
    came, went = Counter(line.kind for line in after), Counter(line.kind for line in before)
    kinds = dict.fromkeys(line.kind for line in (*after, *before))
    counts = [f"{'+' if n > 0 else '−'} {abs(n)} {kind}" for kind in kinds if (n := came[kind] - went[kind])]
    was = {line.name: line for line in before}
    changed = sum(line.name in was and line.text != was[line.name].text for line in after)
    told = "; ".join(part for part in (", ".join(counts), f"{changed} changed" if changed else "") if part)
    return f"{len(before)} → {len(after)} nodes: {told or 'nothing changed'}"


def _changes(before: tuple[_Line, ...], after: tuple[_Line, ...]) -> Iterator[tuple[str, _Line]]:
    """Yield lines that went (−) and came (+), in the order of the graph."""
    matcher = SequenceMatcher(None, [x.text for x in before], [x.text for x in after], autojunk=False)
    for what, a, b, c, d in matcher.get_opcodes():
        if what != "equal":
            yield from (("-", line) for line in before[a:b])
            yield from (("+", line) for line in after[c:d])


def _folded(changes: Iterator[tuple[str, _Line]]) -> Iterator[str]:
    """Yield the first of lines that say the same of repeated blocks, with their number."""
    found: dict[tuple[str, str], list[str]] = {}
    for sign, line in changes:
        found.setdefault((sign, line.same), []).append(line.text)
    for (sign, _), texts in found.items():
        times = f"{len(texts)} ×" if len(texts) > 1 else ""
        yield f"    {times:>6}  {sign} {texts[0]}"


def extract(context: LowerContext, index: int) -> StageGraph:
    """Return the part of the graph that stage ``index`` computes."""
    lowering = context.lowering
    program, stages, denominators = lowering.program, lowering.stages, lowering.denominators
    stage = StageGraph(index, fx.Graph(), nn.Module())
    captured = [n for n in program.graph.graph.nodes if n.op != "output"]
    parts, ep, ep_rank = expert_parts(lowering.experts), lowering.sizes.ep, context.place.get("ep", 0)
    away = {name for name, part in parts.items() if not part.is_held(ep, ep_rank)}
    mine = [n for n in captured if n.op == "call_function" and stages.runs_on(n.name, index)]
    read = {v for n in mine for v in n.all_input_nodes}
    stage.receives = stages.live[index - 1] if index else ()
    stage.sends = stages.live[index] if index < stages.num_stages - 1 else ()
    read |= {program.node(name) for name in stage.sends}
    holders = [n for n in captured if n.op == "placeholder" and n in read and n.name not in away]
    stage.inputs = tuple(n.name for n in holders if n.name in program.inputs)
    stage.denominators = tuple(n.name for n in holders if n.name in denominators)
    for name in (*stage.receives, *stage.inputs, *stage.denominators):
        _place(stage, program.node(name), stage.graph.placeholder(name))
    for node in holders:
        if node.name not in stage.env:
            _attribute(stage, program, node)
    for node in mine:
        if node.target is exchange.own_member:
            (stage.env[node.name],) = (stage.env[n.name] for n in node.all_input_nodes if n.name in stage.env)
        else:
            _place(stage, node, stage.graph.node_copy(node, lambda n: stage.env[n.name]))
    _output(stage, program, stages)
    return stage


def _place(stage: StageGraph, origin: fx.Node, node: fx.Node) -> None:
    node.meta = {**origin.meta, "origin": origin.name}
    stage.env[origin.name] = node


def _attribute(stage: StageGraph, program: Program, node: fx.Node) -> None:
    """Make a parameter, buffer or constant an attribute of the stage module."""
    name = node.name
    if name in program.parameters:
        stage.parameters[name] = name
    elif name in program.buffers:
        stage.buffers[name] = name
        stage.root.register_buffer(name, torch.empty_like(node.meta["val"], device="meta"))
    else:
        stage.root.register_buffer(name, program.constants[name].detach().clone())
    _place(stage, node, stage.graph.create_node("get_attr", name, name=name))


def _output(stage: StageGraph, program: Program, stages: StageAssignment) -> None:
    loss = program.node(program.loss)
    stage.has_loss = runs_here(stages, loss, stage.index)
    names = [*stage.sends, *([loss.name] if stage.has_loss else [])]
    node = stage.graph.output(tuple(stage.env[n] for n in names))
    node.meta["names"] = tuple(names)
