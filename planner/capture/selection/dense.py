"""Data-dependent row selection becomes a dense computation with a mask: then every shape is known.

    token, choice = torch.where(chosen == e)
    out.index_add_(0, token, expert(x[token]) * probs[token, choice, None])
→
    p = where(chosen == e, probs, 0).sum(-1)
    out += where((chosen == e).any(-1), expert(x) * p, 0)

Both are equal if the ops between reading rows and writing them back (or adding them up: ``totals``) act on each row
alone, and if no unselected row makes a gradient NaN (planner.capture.selection.space). All else is refused by line.
"""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from operator import getitem
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from passes.errors import Where
from passes.program.ops.aten import aten, named, packet_of, returns_nothing, shape_of, size_argument
from passes.program.ops.groups import LAID_OUT, LOOKUPS, PLACING
from passes.program.source_lines import where_of
from passes.program.walks import ancestors
from planner.capture.data_dependence import name_of, refused
from planner.capture.model.exchange import tensors_in
from planner.capture.selection.features import Features
from planner.capture.selection.places import (
    COUNT,
    Numbers,
    Positions,
    Rows,
    Slots,
    Writer,
    adds_to,
    column_of,
    columns,
    picks_of_each,
    row_dim,
    runs_along,
    summed,
    symbols_of,
    unspread,
)
from planner.capture.selection.space import (
    Keys,
    Space,
    acts_on_each_row,
    at_most_one,
    key_of_mask,
    root_of,
)
from planner.capture.selection.totals import Totals


class AllRows:
    """A graph of its own, of ``module``, in which no shape depends on data; ``env`` maps each old value to its new one.

    ``nobody``: of masks that a branch asked about, by number, those with selections that write nothing. ``inputs``: of
    the batch. ``constants``: by placeholder. ``asked``: number of each mask that a branch asked about, by key.
    ``told``: the lines that select rows.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        nobody: Collection[int],
        inputs: Sequence[str],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self.write, self.keys = Writer(), Keys()
        self.graph = self.write.graph
        self.features = Features(self.write, inputs, constants)
        self.env: dict[fx.Node, Any] = {}
        self.spaces: dict[sympy.Symbol, Space] = {}
        self.totals = Totals(self.write, self.spaces)
        self.by_mask: dict[str, Space] = {}
        self.asked: dict[str, int] = {}
        self.nobody = nobody
        self.told: dict[Where, None] = {}
        self.live = ancestors([module.graph.output_node()])
        for node in module.graph.nodes:
            self._rewrite(node)

    def _rewrite(self, node: fx.Node) -> None:
        self.write.origin = node
        self.env[node] = made = self._made(node)
        if isinstance(made, fx.Node) and made is self.write.last:
            made._rename(node.name)  # its name in the export's signature
        if "asked" in node.meta and isinstance(made, fx.Node):
            made.meta["asked"] = node.meta["asked"]
            self.asked[key_of_mask(self.keys, made)] = node.meta["asked"]

    def _made(self, node: fx.Node) -> Any:
        value = node.meta.get("val")
        given = [self.env[n] for n in node.all_input_nodes]
        if node.target is getitem and isinstance(given[0], tuple):
            index: Any = node.args[1]
            return given[0][index]
        if (same := unspread(node, self.env)) is not None:
            return same
        if returns_nothing(node.target) and not all(isinstance(v, fx.Node) for v in given):
            return None
        is_number = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        symbols = value.node.expr.free_symbols if is_number else ()
        if is_number and set(symbols) <= self.spaces.keys() and (symbols or any(v is COUNT for v in given)):
            return COUNT
        is_static = not symbols_of(value) and all(isinstance(v, fx.Node) for v in given)
        if is_static and (placed := self.features.scattered(node, self.env)) is not None:
            return placed
        if is_number or is_static or node.op != "call_function":
            return self.write.graph.node_copy(node, lambda n: self._static(node, n))
        if not symbols_of(value) and (total := self.totals.of(node, self.env)) is not None:
            return total
        found = self._select(node, given) or self._place(node) or self._put(node)
        if found is not None:
            return found
        if any(isinstance(v, Positions) for v in given):
            return self._positions(node)
        return self._rows(node)

    def _static(self, reader: fx.Node, node: fx.Node) -> fx.Node:
        made = self.env[node]
        if isinstance(made, fx.Node):
            return made
        where = reader if reader.op == "call_function" else node
        if made is COUNT:
            raise refused(where, "Python computes with the number of selected rows")
        raise refused(where, f"the output shape of {name_of(node)} depends on data")

    # ---- selections

    def _select(self, node: fx.Node, given: list[Any]) -> Any:
        is_where = node.target is getattr(aten.where, "default", None)
        if packet_of(node.target) not in (aten.nonzero, aten.nonzero_numpy, aten.argwhere) and not is_where:
            return None
        if not isinstance(given[0], fx.Node):
            raise refused(node, "rows are selected from selected rows")
        space = self._space(given[0])
        self._note(space, node.meta["val"])
        dims = tuple(range(len(space.shape)))
        if isinstance(node.meta["val"], (tuple, list)):
            return tuple(Positions(space, (d,)) for d in dims)
        return Positions(space, dims)

    def _note(self, space: Space, value: Any) -> None:
        """Note that the number of rows in ``value`` is that of ``space``; masks written twice have one number."""
        known = next((symbol for symbol, of in self.spaces.items() if of is space), None)
        for symbol in sorted(symbols_of(value) - self.spaces.keys(), key=str):
            self.spaces[symbol] = space
            if known is not None:
                tensors_in(value)[0].fake_mode.shape_env._set_replacement(symbol, known, "")  # pyright: ignore
        origin = self.write.origin
        assert origin is not None
        if origin in self.live:
            self.told[where_of(origin)] = None

    def _space(self, mask: fx.Node) -> Space:
        if mask.meta["val"].dtype != torch.bool:
            mask = self.write.call(aten.ne.Scalar, mask, 0)
        key = self.keys(mask)
        if key not in self.by_mask:
            ndim = len(shape_of(mask))
            gone = sorted(at_most_one(mask))[:1] if ndim > 1 else []
            kept = tuple(d for d in range(ndim) if d not in gone)
            rows = self.write.call(aten.any.dim, mask, gone[0]) if gone else mask
            num = prod(shape_of(mask)[d] for d in kept)
            self.by_mask[key] = Space(mask, key, kept, self.write.shaped(rows, [num]))
        return self.by_mask[key]

    # ---- reading at positions

    def _place(self, node: fx.Node) -> Rows | None:
        packet, given = packet_of(node.target), named(node)
        if packet not in LOOKUPS:
            return None
        x = self.env[given["self"]]
        found = self._slots(node, given)
        if found is None or not isinstance(x, fx.Node):
            return None
        space, slots = found
        if not slots.fit(x, space) or (slots.dims[0] != row_dim(node.meta["val"])):
            raise refused(node, f"the shape of what {name_of(node)} makes depends on data")
        if set(slots.of_mask) & set(space.gone) and x.meta["val"].dtype == torch.bool:
            raise refused(node, "bools are read at selected positions")
        self._note(space, node.meta["val"])
        rows = self.write.read(space, x, slots)
        return Rows(space, self.write.kept_small(space, rows, slots.dims[0]), (x, slots))

    def _slots(self, node: fx.Node, given: Mapping[str, Any]) -> tuple[Space, Slots] | None:
        """Return the mask and dims of the positions; None if something else gives positions. ``given``: the arguments,
        one index and its dim, or several of the first dims.
        """
        alone = "index" in given
        indices, dim = [given["index"]] if alone else given["indices"], 0
        if alone:
            dim = int(given["dim"]) % len(given["self"].meta["val"].shape)
        found: list[tuple[Space, int, int]] = []
        for index in indices:
            made = self.env[index] if isinstance(index, fx.Node) else None
            if index is None:
                dim += 1
            elif isinstance(made, Positions) and len(made.dims) == 1 and (alone or index.meta["val"].dim() == 1):
                found.append((made.space, dim, made.dims[0]))
                dim += 1
            elif isinstance(made, fx.Node) and made.meta["val"].dtype == torch.bool:
                space = self._space(made)
                found += [(space, dim + d, d) for d in range(len(space.shape))]
                dim += len(space.shape)
            else:
                return None
        if alone and not runs_along(node, indices[0], dim - 1):
            return None
        spaces = {space.key: space for space, _, _ in found}
        if len(spaces) > 1:
            raise refused(node, "positions of two selections are used together")
        return (next(iter(spaces.values())), Slots(tuple((d, m) for _, d, m in found))) if spaces else None

    # ---- writing at positions

    def _put(self, node: fx.Node) -> fx.Node | None:
        packet, given = packet_of(node.target), named(node)
        if packet not in PLACING:
            return None
        out = self.env[given["self"]]
        source: Any = given.get("source", given.get("src", given.get("values")))
        found = self._slots(node, given)
        if found is None or not isinstance(out, fx.Node) or not isinstance(source, fx.Node):
            return None
        space, slots = found
        rows = self._written(space, self.env[source])
        adds = adds_to(node)
        if rows is None or adds is None or not slots.fit(out, space):
            raise refused(node, f"{name_of(node)} writes values other than the selected rows")
        if not adds and not set(space.kept) <= set(slots.of_mask):
            raise refused(node, "several selected rows may be written to one position")
        if self.asked.get(key_of_mask(self.keys, root_of(space.mask))) in self.nobody:
            return out
        if packet is aten.index_add and given["alpha"] != 1:
            rows = Rows(space, self.write.call(aten.mul.Tensor, rows.node, given["alpha"]))
        if not adds and rows.addend is not None and rows.source == (out, slots):
            return self.write.added(space, out, slots, rows.addend)
        return (self.write.added if adds else self.write.replaced)(space, out, slots, rows.node)

    def _written(self, space: Space, made: Any) -> Rows | None:
        """Return the written value, with all rows; it may be one number for all rows."""
        if isinstance(made, Rows):
            return made if made.space is space else None
        is_one = isinstance(made, fx.Node) and made.meta["val"].numel() == 1
        return Rows(space, self.write.shaped(made, [])) if is_one else None

    # ---- ops on positions and on rows

    def _positions(self, node: fx.Node) -> Any:
        """Return positions in another layout, or columns of them."""
        made = self.env[node.all_input_nodes[0]]
        packet, value = packet_of(node.target), node.meta["val"]
        if isinstance(made, Positions) and node.all_input_nodes[0] is node.args[0]:
            if len(made.dims) == 1 and (packet in LAID_OUT or packet is aten.repeat) and row_dim(value) is not None:
                return made
            column = column_of(node.all_input_nodes[0].meta["val"])
            if column is not None:
                found = columns(node, made.dims, column)
                if isinstance(found, list):
                    return tuple(Positions(made.space, dims) for dims in found)
                if found is not None:
                    return Positions(made.space, found)
        raise refused(node, f"{name_of(node)} computes with the positions of selected rows")

    def _rows(self, node: fx.Node) -> Rows | Numbers:
        value = node.meta["val"]
        if node.target is getitem:
            made, index = self.env[node.all_input_nodes[0]], node.args[1]
            if not isinstance(made, Rows):
                raise refused(node, "a list of selections is unpacked")
            val = made.node.meta["val"][index]
            return Rows(made.space, self.write.emit(getitem, (made.node, index), {}, val))
        space = self._space_of(node, value)
        if (features := self.features.cut(node, self.env, space)) is not None:
            return features
        if packet_of(node.target) is aten.arange and [self.env.get(n) for n in node.args] == [COUNT]:  # pyright: ignore
            return Numbers(space, self.write.call(aten.arange.default, space.num, **node.kwargs))
        is_row = (Rows, Numbers) if picks_of_each(node, self.env) else Rows
        own = {n: row_dim(n.meta["val"]) for n in node.all_input_nodes if isinstance(self.env[n], is_row)}
        inputs = {n: d for n, d in own.items() if d is not None}
        rests = [n for n in node.all_input_nodes if n not in inputs and not isinstance(self.env[n], fx.Node)]
        counts = size_argument(node.target) is not None and all(self.env[n] is COUNT for n in rests)
        if any(self.env[n] is COUNT for n in rests) and not counts:
            raise refused(node, "the number of selected rows is used in a computation")
        acts = is_row is not Rows or acts_on_each_row(node, inputs, row_dim(value))
        if (rests and not counts) or not acts:
            raise refused(node, f"the input shape of {name_of(node)} depends on data, and it may mix rows")
        guarded = self.write.kept_regular(space, node, {n: (self.env[n].node, d) for n, d in inputs.items()})
        args = map_aggregate(tuple(node.args), lambda a: self._resolved(a, guarded))
        kwargs = map_aggregate(dict(node.kwargs), lambda a: self._resolved(a, guarded))
        made = self.write.call(node.target, *args, **kwargs)  # pyright: ignore
        self._check(node, made)
        dim = row_dim(value)
        rows = Rows(space, self.write.kept_small(space, made, dim) if dim is not None else made)
        return summed(node, rows, self.env)

    def _space_of(self, node: fx.Node, value: Any) -> Space:
        spaces = {made.space.key: made.space for n in node.all_input_nodes if isinstance(made := self.env[n], Rows)}
        spaces |= {self.spaces[s].key: self.spaces[s] for s in symbols_of(value) if s in self.spaces}
        if len(spaces) != 1:
            raise refused(node, f"the shape of what {name_of(node)} makes depends on data")
        return next(iter(spaces.values()))

    def _resolved(self, argument: Any, guarded: Mapping[fx.Node, fx.Node]) -> Any:
        if isinstance(argument, torch.SymInt):
            return self._sized(argument)
        if not isinstance(argument, fx.Node):
            return argument
        made = self.env[argument]
        if argument in guarded:
            return guarded[argument]
        if made is COUNT:
            return self._sized(argument.meta["val"])
        return made.node if isinstance(made, Rows) else made

    def _sized(self, size: Any) -> int:
        """Return a size with all rows in place of the selected ones."""
        if isinstance(size, int):
            return size
        return int(size.node.expr.subs({s: space.num for s, space in self.spaces.items()}))

    def _check(self, node: fx.Node, made: fx.Node) -> None:
        for before, after in zip(tensors_in(node.meta["val"]), tensors_in(made.meta["val"]), strict=True):
            if row_dim(before) is None or [self._sized(n) for n in before.shape] != list(after.shape):
                raise refused(node, f"{name_of(node)} mixes the selected rows")
