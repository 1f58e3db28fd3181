"""Features put at the positions that a mask selects: the first at the first position of a sequence, and so on.

    x.masked_scatter(mask, features)        mask [b, s], features [b·n, ..]
    x[mask] = features
    x[mask] + features[:n]                  with all rows of x; n, how many the mask selects, is written by capture
    →
    where(mask, features[b, rank], x)       rank [b, s] = cumsum(mask) − 1 of each sequence

A microbatch then computes the same as in its batch if each sequence has n positions, which a host checks.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from passes.errors import Where
from passes.program.ops.aten import aten, named, packet_of, shape_of
from passes.program.ops.groups import SAME
from passes.program.program import Assumption
from passes.program.source_lines import where_of
from passes.program.walks import in_order
from planner.capture.data_dependence import refused
from planner.capture.selection.conditions import that
from planner.capture.selection.places import Rows, Writer
from planner.capture.selection.space import Space


class Features:
    """Owns the ``checks`` that each sequence has as many positions as features. ``inputs``: of the batch, by name."""

    def __init__(self, write: Writer, inputs: Sequence[str], constants: Mapping[str, Tensor]) -> None:
        self.checks: dict[tuple[Where, str], Assumption] = {}
        self._write, self._inputs, self._constants = write, inputs, constants

    def scattered(self, call: fx.Node, env: Mapping[Any, Any]) -> fx.Node | None:
        """Return the value of a call that ``scatters``; None for other calls, and if it stays. ``env``: new values."""
        if not scatters(call):
            return None
        given, shape = named(call), shape_of(call)
        if "mask" in given:
            x, mask, source = (env[given[name]] for name in ("self", "mask", "source"))
            mask, num = self._along_first_dims(mask, shape)
        else:
            x, mask, source = env[given["self"]], env[given["indices"][0]], env[given["values"]]
            num = len(shape_of(mask))
        rows = self._at(call, mask, source, shape[num:])
        if rows is None:
            return None
        chosen = self._write.shaped(mask, [*shape[:num], *[1] * (len(shape) - num)])
        return self._write.call(aten.where.self, chosen, self._write.shaped(rows, shape), x)

    def _along_first_dims(self, mask: fx.Node, shape: Sequence[int]) -> tuple[fx.Node, int]:
        """Return ``mask`` without last dims along which it is constant in ``shape``, and how many it keeps."""
        while _is_spread(mask) and mask.args[0].meta["val"].dtype == torch.bool:  # pyright: ignore
            mask = mask.args[0]  # pyright: ignore[reportAssignmentType]
        strides = mask.meta["val"].expand(shape).stride()
        is_shared = [stride == 0 or size == 1 for stride, size in zip(strides, shape, strict=True)]
        num = max((d + 1 for d, shared in enumerate(is_shared) if not shared), default=0)  # dims that it chooses along
        if shape_of(mask) != shape:
            mask = self._write.call(aten.expand.default, mask, list(shape))
        for _ in shape[num:]:
            mask = self._write.call(aten.select.int, mask, -1, 0)
        return mask, num

    def cut(self, call: fx.Node, env: Mapping[Any, Any], space: Space) -> Rows | None:
        """Return features that are cut to as many rows as the mask of ``space`` selects; None for other calls."""
        given = named(call)
        if packet_of(call.target) is not aten.narrow or not isinstance(env[given["self"]], fx.Node) or given["start"]:
            return None
        source = env[given["self"]]
        inner = shape_of(source)[1:]
        rows = None if space.gone else self._at(call, space.mask, source, inner)
        if rows is None:
            raise refused(call, "no host can check how many rows of each sequence are selected")
        return Rows(space, self._write.shaped(rows, [space.num, *inner]))

    def _at(self, call: fx.Node, mask: fx.Node, source: fx.Node, inner: Sequence[int]) -> fx.Node | None:
        """Return [b, s, ..]: the feature of each position, and any one elsewhere. ``inner``: dims of one feature."""
        if len(shape_of(mask)) < 2:
            return None
        batch, length, width = shape_of(mask)[0], prod(shape_of(mask)[1:]), prod(inner)
        num, rest = divmod(prod(shape_of(source)), batch * width)
        if rest or not self._is_checked(call, mask, num):
            return None
        write = self._write
        rank = write.call(aten.cumsum.default, write.shaped(mask, [batch, length]), 1)
        rank = write.call(aten.clamp.default, write.call(aten.sub.Tensor, rank, 1), 0)
        rank = write.call(aten.expand.default, write.shaped(rank, [batch, length, 1]), [batch, length, width])
        return write.call(aten.gather.default, write.shaped(source, [batch, num, width]), 1, rank)

    def _is_checked(self, call: fx.Node, mask: fx.Node, num: int) -> bool:
        """Return whether a host can check that each sequence has ``num`` positions."""

        def truth(graph: fx.Graph, mask: fx.Node) -> fx.Node:
            counts = graph.call_function(aten.sum.dim_IntList, (mask, dims))
            return graph.call_function(aten.all.default, (graph.call_function(aten.eq.Scalar, (counts, num)),))

        dims = list(range(1, len(shape_of(mask))))
        made = that(truth, mask, in_order([mask]), None, constants=self._constants)
        check = None if made is None else made.named(self._inputs)
        if check is not None:
            where, what = where_of(call), f"each sequence has {num} positions for its {num} features"
            self.checks[where, what] = Assumption(where, what, check)
        return check is not None


def scatters(call: fx.Node) -> bool:
    """Return whether a call writes rows, in their order, to the positions that a mask selects."""
    if packet_of(call.target) is not aten.index_put:
        return packet_of(call.target) is aten.masked_scatter
    given, shape = named(call), shape_of(call)
    (mask, *more), values = given["indices"], shape_of(given["values"])
    if mask is None or more or mask.meta["val"].dtype != torch.bool or given["accumulate"]:
        return False
    return values[:1] > (1,) and values[1:] == shape[len(shape_of(mask)) :]


def _is_spread(mask: fx.Node) -> bool:
    return mask.target in SAME or packet_of(mask.target) in (aten.expand, aten.expand_as)
