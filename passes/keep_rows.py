"""Generation with kept keys and values: one pass for the forward of all positions, one for that of a single one.

    keep_rows      k  →  keep(k): the values that later positions read go to buffers
    cut_to_row     the stage computes one position: what it reads of all positions is a buffer, or known in full

So attention of one query reads the keys of a buffer; positions, masks and tables are computed as they are captured, and
their row is a slice, taken as early as can be.

Needs:   a localised graph (passes.localize), and ``context.one_row``.
Leaves:  (cut_to_row) the results of the stage are those of one position; it has no loss.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from passes.base import LowerContext, StageGraph
from passes.ops import collectives
from passes.ops.attention import shared_key_attention
from passes.ops.kept_rows import KeptRows, extend, keep, row_at, seen_at
from passes.ops.loss_head import last_row
from passes.partition.sequence.partition import resized
from passes.partition.sequence.rules import RULES, triangle
from passes.partition.sequence.versions import Made, OneRow, as_version, needed_versions, refused
from passes.partition.typings.base import Option
from passes.partition.writer import local_arguments
from passes.program.ops.aten import aten, position_of, shape_of
from passes.program.ops.groups import Ops
from passes.program.source_lines import origin_of
from passes.program.walks import last_of_header
from passes.program.weights import is_weight
from passes.types.types import P, Placement, R

KEPT = "kept"  # the attribute of the stage's module
# They depend on the places of rows and columns.
LATE = Ops("", [packet for packet, rule in RULES.items() if rule is triangle])
SDPA = aten.scaled_dot_product_attention.default


def keep_rows(stage: StageGraph, context: LowerContext) -> None:
    """Values that the program of one position reads of all positions are kept by the forward of all."""
    handle = stage.handle(KEPT, KeptRows(context.random))
    for node, versions in _versions(stage, context).items():
        if any(_is_kept(version, made) for version, made in versions.items()):
            value = stage.env[node.name]
            with stage.graph.inserting_before(last_of_header(value).next):
                kept = stage.call(value, keep, (value, handle, node.name), value.meta["val"])
            kept.meta = dict(value.meta)
            value.replace_all_uses_with(kept, delete_user_cb=lambda user, new=kept: user is not new)
            stage.env[node.name] = kept


def cut_to_row(stage: StageGraph, context: LowerContext) -> None:
    """The stage computes one position; it returns the values that it sends, and the row of logits."""
    writer = _Writer(stage, context, _versions(stage, context))
    writer.write()
    needed = {node.name for node in _one_row(context).needed}
    stage.receives = tuple(name for name in stage.receives if name in needed)
    stage.sends = tuple(name for name in stage.sends if name in needed)
    stage.graph, stage.env = writer.graph, {}
    stage.has_scores, stage.has_loss, stage.denominators = stage.has_loss, False, ()


def _one_row(context: LowerContext) -> OneRow:
    assert context.one_row is not None, "no types along the sequence"
    return context.one_row


def _versions(stage: StageGraph, context: LowerContext) -> dict[fx.Node, Made]:
    """Return the versions of the stage's values, of the captured graph, that the program of one position needs."""
    rows, program = _one_row(context), context.lowering.program
    nodes = [program.node(name) for name in stage.env]
    nodes = [node for node in nodes if node in rows.needed]
    results = {program.node(name): rows.types.of(program.node(name)) for name in stage.sends}
    results |= {rows.logits: rows.types.of(rows.logits)} if stage.has_loss else {}
    results = {node: as_version(t) for node, t in results.items() if node in rows.needed}
    given = {program.node(name) for name in stage.receives}
    if rows.logits not in nodes and stage.has_loss:
        raise refused(rows.logits, "the last stage does not compute the logits")
    versions = needed_versions(nodes, rows.types, results, given, LATE)
    for node, of_node in versions.items():
        _check(node, of_node, context, rows.length)
    return versions


def _check(node: fx.Node, versions: Made, context: LowerContext, length: int) -> None:
    for version, made in versions.items():
        if P in (version, made):
            raise refused(node, "a sum over the positions of a sequence reaches the logits")
        if made != version and not isinstance(made, Option) and not isinstance(node.meta["val"], torch.Tensor):
            raise refused(node, "one of its several results is read at other positions")
        own = context.lowering.placements.of(node)
        if _is_kept(version, made) and _is_along(own, made):
            raise refused(node, "each rank of tp keeps a part of the sequence of it")
        if version == R and own.is_sharded and not is_weight(node) and shape_of(node)[own.dim] == length:
            raise refused(node, "it is read at all positions, and is sharded along one dim of their number over tp")


def _is_kept(version: Placement, made: Option | Placement) -> bool:
    return version == R and isinstance(made, Placement) and made.is_sharded


def _is_along(placement: Placement, cut: Option | Placement) -> bool:
    """Return whether a type over tp shards the very dim of the positions: sequence parallelism."""
    return isinstance(cut, Placement) and placement.is_sharded and cut.is_sharded and placement.dim == cut.dim


class _Writer:
    """Writes the graph of one position. ``made``: each version of a captured value in it."""

    def __init__(self, stage: StageGraph, context: LowerContext, versions: Mapping[fx.Node, Made]) -> None:
        self.stage, self.context, self.versions = stage, context, versions
        self.rows = _one_row(context)
        self.graph = fx.Graph()
        self.made: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.carried: dict[tuple[fx.Node, Placement], fx.Node] = {}
        program = context.lowering.program
        self.captured = {stage.env[name]: program.node(name) for name in stage.env}
        setattr(stage.root, KEPT, KeptRows(context.random))
        self.kept = self.graph.create_node("get_attr", KEPT)

    def write(self) -> None:
        dropped = {self.stage.env[name] for name in (*self.stage.denominators,)}
        dropped |= {value for value, node in self.captured.items() if node.name in self.stage.receives}
        dropped -= {self.stage.env[node.name] for node in self.versions if node.name in self.stage.env}
        for node in self.stage.graph.nodes:
            if node.op in ("placeholder", "get_attr") and node not in dropped:
                self._argument(node)
        for node in self.versions:
            if node.op == "call_function" and node.name not in self.stage.receives:
                for version, made in self.versions[node].items():
                    if isinstance(made, Option):
                        self.made[node, version] = self._computed(node, made)
            for version, made in self.versions[node].items():
                if not isinstance(made, Option) and version != made:
                    self.made[node, version] = self._converted(node, made, version)
        self._results()

    def _argument(self, node: fx.Node) -> None:
        new = self.graph.node_copy(node)
        captured = self.captured.get(node)
        self.carried[node, R] = new
        if captured is None:
            return
        own = self.rows.types.of(captured) if captured.name in self.stage.receives else R
        self.made[captured, own] = new
        self._be_of(new, own)

    # ---- ops

    def _computed(self, node: fx.Node, option: Option) -> fx.Node:
        """Return the op of a version: as it stands in the stage, over the versions of its operands that it reads."""
        wanted = {n: as_version(t) for n, t in zip(node.all_input_nodes, option.args, strict=True)}
        return self._copied(self.stage.env[node.name], node, option, wanted)

    def _copied(self, local: fx.Node, node: fx.Node, option: Option, wanted: dict[fx.Node, Placement]) -> fx.Node:
        def read(value: fx.Node) -> fx.Node:
            if value.meta.get("origin") == node.name and value not in self.captured and "change" not in value.meta:
                return self._copied(value, node, option, wanted)
            return self._read(value, node, wanted)

        args, kwargs = map_arg(local.args, read), map_arg(local.kwargs, read)
        target: Any = local.target
        new = self.graph.call_function(target, args, kwargs)
        new.meta = dict(local.meta)
        self._be_of(new, option.out)
        if option.out.is_sharded:
            self._resize(new, local, node, option)
            self._attend(new)
        return new

    def _read(self, value: fx.Node, reader: fx.Node, wanted: Mapping[fx.Node, Placement]) -> fx.Node:
        """Return the version of an operand, through the changes of its type over tp."""
        captured = self.captured.get(value)
        if captured is not None and (made := self.made.get((captured, wanted.get(captured, R)))) is not None:
            return made
        if value.op == "get_attr":
            return self.carried[value, R]
        if captured is not None or "change" not in value.meta:
            raise refused(reader, "it is computed in several steps on this rank")
        source = value
        while source not in self.captured:
            source = source.all_input_nodes[0]
        version = wanted.get(self.captured[source], R)
        if (value, version) not in self.carried:
            self.carried[value, version] = self._changed(
                value, self._read(value.all_input_nodes[0], reader, wanted), version
            )
        return self.carried[value, version]

    def _changed(self, value: fx.Node, source: fx.Node, version: Placement) -> fx.Node:
        """A change of type over tp. What sequence parallelism shards along the positions is whole on each rank here."""
        change, given = value.meta["change"], list[Any](value.args)
        before, after = (R if _is_along(t, version) else t for t in (change.before, change.after))
        axis = self.carried[given[1], R]
        arguments: Any = (source, axis, before if before.is_sharded else after)
        target: Any = value.target
        if (before, after) == (change.before, change.after):
            new = self.graph.call_function(target, (source, axis, *given[2:]))
        elif before == P:
            new = self.graph.call_function(collectives.g, (source, axis))
        elif before.is_sharded:
            new = self.graph.call_function(collectives.collect, arguments)
        elif after.is_sharded:
            new = self.graph.call_function(collectives.cut_part, arguments)
        else:
            return source
        new.meta = dict(value.meta)
        self._be_of(new, version)
        return new

    def _resize(self, new: fx.Node, local: fx.Node, node: fx.Node, option: Option) -> None:
        """Written sizes and bounds become those of one position; over tp they are local already."""
        tp = self.context.tp.size if _is_along(self.context.lowering.placements.of(node), option.out) else 1
        for place, (whole, cut) in enumerate(
            zip(node.args, local_arguments(node, option, self.rows.length), strict=True)
        ):
            if whole != cut:
                if local.target is not node.target:
                    raise refused(node, "its sizes are not known on this rank")
                new.update_arg(place, _resized(local.args[place], whole, cut, node, tp))

    def _attend(self, new: fx.Node) -> None:
        """Causal attention: the query sees the keys up to its own."""
        if new.target is SDPA:
            place = position_of(SDPA, "is_causal")
            is_causal = new.args[place] if place < len(new.args) else new.kwargs.get("is_causal", False)
            if is_causal and place < len(new.args):
                new.update_arg(place, False)
        elif new.target is shared_key_attention:
            is_causal = new.kwargs.get("is_causal", False)
        else:
            return
        if is_causal:
            new.kwargs = {key: value for key, value in new.kwargs.items() if key != "is_causal"}
            with self.graph.inserting_before(new):
                for place in (1, 2):
                    seen = self.graph.call_function(seen_at, (new.args[place], self.kept))
                    seen.meta = dict(new.args[place].meta)  # pyright: ignore
                    new.update_arg(place, seen)

    # ---- other positions

    def _converted(self, node: fx.Node, before: Placement, after: Placement) -> fx.Node:
        value, cut = self.made[node, before], before if before.is_sharded else after
        count = len(cut.segments)
        if before.is_sharded:
            new = self.graph.call_function(extend, (value, self.kept, node.name, cut.dim, count))
        else:
            new = self.graph.call_function(row_at, (value, self.kept, cut.dim, count, self.rows.length))
        new.meta = dict(value.meta)
        new.meta["val"] = node.meta["val"]
        self._be_of(new, after)
        return new

    def _be_of(self, new: fx.Node, cut: Placement) -> None:
        """The meta value of one position."""
        value = new.meta.get("val")
        if not cut.is_sharded or not isinstance(value, torch.Tensor):
            return
        new.meta["val"] = resized(value, cut.local_shape(tuple(value.shape), self.rows.length))

    # ---- results

    def _results(self) -> None:
        program, types = self.context.lowering.program, self.rows.types
        names = [name for name in self.stage.sends if program.node(name) in self.rows.needed]
        output = self.stage.graph.output_node()
        sent: dict[str, fx.Node] = dict(zip(output.meta["names"], output.args[0], strict=True))  # pyright: ignore
        wanted = {program.node(name): as_version(types.of(program.node(name))) for name in names}
        results = [self._read(sent[name], program.node(name), wanted) for name in names]
        if self.stage.has_loss:
            results.append(self._row_of_logits())
            names.append("scores")
        made = self.graph.output(tuple(results))
        made.meta["names"] = tuple(names)

    def _row_of_logits(self) -> fx.Node:
        node = self.rows.logits
        local, value = self.stage.env[node.name], self.made[node, self.rows.types.of(node)]
        placement = local.meta["placement"]
        last = len(node.meta["val"].shape) - 1
        is_along = _is_along(placement, self.rows.types.of(node))
        if placement == P or (placement.is_sharded and placement.dim != last and not is_along):
            raise refused(node, f"its rows are {placement} over tp")
        handle = self._axis() if placement.is_sharded and not is_along else None
        is_counted = self.context.tp.rank == 0
        given = (value, self.rows.dtype, handle, int(node.meta["val"].shape[-1]), is_counted)
        new = self.graph.call_function(last_row, given)
        new.meta = origin_of(local) | {"origin": local.meta["origin"]}
        return new

    def _axis(self) -> fx.Node:
        held = self.stage.axis(self.context.tp)
        if (held, R) not in self.carried:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.carried[held, R] = self.graph.node_copy(held)
        return self.carried[held, R]


def _resized(local: Any, whole: Any, cut: Any, node: fx.Node, tp: int) -> Any:
    """Return an argument of a rank, ``whole`` in the captured graph, where one position changes it to ``cut``. ``tp``:
    ranks over which the positions are sharded."""
    if isinstance(whole, (list, tuple)):
        return [_resized(a, b, c, node, tp) for a, b, c in zip(local, whole, cut, strict=True)]
    if whole == cut or local == -1:
        return local
    if local == whole // tp:
        return cut
    raise refused(node, "one dim of it is sharded along the sequence, and along tp")
