"""``--data FILE.py:FUNCTION``: a stream from the user's code, one for each dp rank.

    function(rank, size)       returns an iterator of dicts for a dp coordinate; its ranks must get the same items
    {"ids": [17, 4, 98]}       a sample, with optional labels (-100: none) or supervised (one flag per id), packed here
    {"input_ids": tensor, …}   tensors by input name: the rows of this rank in one step
    position                   number of items taken, ``state_dict()`` if defined, and tokens not yet used by a step

Samples are packed first fit into the sequences of a step; the first sample that fits nowhere begins the next step.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from passes.errors import PlanError, first_line, refusing
from planner.files.named_code import NamedCode, is_named, line_of
from planner.spec.spec import Spec
from runtime.data.batches import BatchLayout, digest_of
from runtime.data.objectives.next_token import check_packed, packed, padded
from runtime.data.objectives.samples import NOTHING, pieces_of, windows_of
from runtime.data.token_batches import length_of, roles_of, stacked
from runtime.data.tokens import LABEL, Tokenization, Tokens
from runtime.distributed.agreement import agree, all_gather_json
from runtime.distributed.groups import Groups

Sample = tuple[np.ndarray, np.ndarray]  # ids (int64) and whether each is a label (bool): [tokens]
_FIX = "correct the function of --data"
_KEPT = 8  # positions; more than the number of batches made ahead


class StreamEnd(Exception):
    """The stream has no whole step left."""


def is_stream(source: str) -> bool:
    return is_named(source) and not Path(source).exists()


def stream_function(source: str) -> Callable[[int, int], Any]:
    """Return the function that ``source`` names. Raises PlanError if there is none with two parameters."""
    return NamedCode(source, "--data").function(2)[0]


class Stream:
    """The rows of one dp rank, step by step. Owns the iterator, and the positions after the last steps.

    ``keeps``: keep a position per step for saves: batches are made ahead of the step that is saved.
    """

    def __init__(self, source: str, spec: Spec, layout: BatchLayout, *, keeps: bool) -> None:
        self.source, self.is_local, self.told = source, layout.dp > 1, ""
        self._spec, self._layout, self._keeps = spec, layout, keeps
        self._inputs, self._function = spec.longest.require_inputs(), stream_function(source)
        self._iterable: Any = None
        self._items: Iterator[Any] | None = None
        self._taken, self._is_whole, self._state = 0, False, None
        self._waiting: list[Sample] = []
        self._left = np.zeros(0, np.int64)  # of packing: true
        self._first = self._position()
        self._positions: dict[int, dict[str, Any]] = {}

    def go_on(self, saved: Any) -> None:
        """Continue after the position of a save. Raises PlanError if it holds states of another number of dp ranks."""
        if not isinstance(saved, Mapping):
            return
        size, positions = self._layout.dp, saved["positions"]
        if len(positions) == size:
            own = positions[self._layout.dp_rank]
            self._taken, self._state = own["taken"], own["state"]
            self._waiting = [(np.array(ids, np.int64), np.array(flags, bool)) for ids, flags in own["waiting"]]
            self._left, self._first = np.array(own["left"], np.int64), own
            return
        if any(each["state"] is not None for each in positions):
            what = f"the save holds states of a stream for {len(positions)} dp ranks, this run has {size}"
            fix = f"resume with dp {len(positions)}, or give a stream without state_dict"
            raise PlanError(what, where="--resume", fix=fix)
        self._taken = positions[0]["taken"]
        if not positions[0]["is_whole"]:
            total = sum(each["taken"] - bool(each["waiting"]) for each in positions)
            self._taken = -(-(total - self._layout.dp_rank) // size)
            self.told = f"{total:,} items of {self.source}, taken by {len(positions)} dp ranks, are skipped by {size}"
        self._first = self._position()

    def batch(self, step: int) -> dict[str, Tensor]:
        """Return the rows of the next step. Raises StreamEnd at the end, PlanError for an error of the stream."""
        if self._items is None:
            self._items = self._opened()
        batch = self._next_batch()
        if not self._layout.lengths:
            self._layout.check(self._layout.in_rows(batch), local=self.is_local)
        if self._keeps:
            self._positions[step + 1] = self._position()
            self._positions.pop(step + 1 - _KEPT, None)
        return batch

    def agreed(self, groups: Groups, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor] | None:
        """Return the batch that ``make`` returns, or None if some rank has no more. Collective: call it on every rank.

        Raises PlanError on all ranks for an error on any, and if ranks of one dp coordinate have different batches.
        """
        batch, error, digest = None, None, ""
        try:
            batch = make()
            digest = digest_of(batch)
        except StreamEnd:
            pass
        except PlanError as refusal:
            error = refusal
        agree(groups, error)
        first: dict[int, tuple[int, str]] = {}
        digests = all_gather_json(groups, [self._layout.dp_rank, digest])
        for rank, (coordinate, of_rank) in enumerate(digests):
            other, expected = first.setdefault(coordinate, (rank, of_rank))
            if of_rank != expected:
                what = f"ranks {other} and {rank} are of dp rank {coordinate}, but {self.source} gave them other items"
                fix = "make the items depend on rank and size alone: seed random numbers"
                raise PlanError(what, where="--data", fix=fix)
        return batch if all(of_rank for _, of_rank in digests) else None

    def saved(self, groups: Groups, step: int) -> dict[str, Any]:
        """Return the positions of all dp ranks after a step. Collective: call it on every rank."""
        own = self._positions.get(step, self._first)
        by_rank = dict(all_gather_json(groups, [self._layout.dp_rank, own]))
        return {"positions": [by_rank[rank] for rank in sorted(by_rank)]}

    def _opened(self) -> Iterator[Any]:
        state, taken, self._state, self._taken = self._state, self._taken, None, 0
        with self._users_code():
            self._iterable = self._function(self._layout.dp_rank, self._layout.dp)
            if state is not None:
                self._iterable.load_state_dict(state)
            items = iter(self._iterable)
        if state is not None:
            self._taken = taken
        while self._taken < taken:
            self._next(items)
        return items

    def _next(self, items: Iterator[Any]) -> Mapping[str, Any]:
        with self._users_code():
            item = next(items, StreamEnd)
        if item is StreamEnd:
            raise StreamEnd
        self._taken += 1
        if not isinstance(item, Mapping):
            raise self._bad(f"is a {type(item).__name__}, not a dict")
        return item

    def _next_batch(self) -> dict[str, Tensor]:
        assert self._items is not None
        if not self._waiting:
            item = self._next(self._items)
            # inputs may have the names of a sample's keys: one-dimensional "ids" are a sample, not a batch
            ids = item.get("ids")
            is_sample = ids is not None and not (isinstance(ids, Tensor) and ids.dim() > 1)
            self._is_whole = item.keys() == self._inputs.keys() and not is_sample
            if self._is_whole:
                if not all(isinstance(value, Tensor) for value in item.values()):
                    raise self._bad("has values that are no tensors")
                return dict(item)
            self._waiting = self._samples(item)
        with self._spec.locating():
            roles = roles_of(self._inputs, self._spec.data.inputs)
        shapes = {role: self._inputs[name].sizes for name, role in roles.items()}
        length = length_of(self._inputs, roles)
        if self._spec.data.packing == "documents":
            check_packed(shapes)
        most = 1 if self._spec.data.packing != "documents" else shapes.get("cu_seqlens", (length + 2,))[0] - 2
        rows = self._rows(self._items, length, most)
        if self._spec.data.packing == "documents":
            return stacked([packed(row, length, 0, shapes) for row in rows], roles, self._inputs)
        return stacked([padded(ids, length, 0, is_label) for ((ids, is_label),) in rows], roles, self._inputs)

    def _rows(self, items: Iterator[Any], length: int, most: int) -> list[list[Sample]]:
        """Return the samples of each sequence of a step. Raises StreamEnd if a sequence would be empty."""
        rows: list[list[Sample]] = [[] for _ in range(self._layout.local_size)]
        room = [length] * len(rows)
        try:
            while True:
                while not self._waiting:
                    self._waiting = self._samples(self._next(items))
                size = min(length, len(self._waiting[0][0]))  # a window also holds the next token
                fitting = (n for n, left in enumerate(room) if left >= size and len(rows[n]) < most)
                if (place := next(fitting, None)) is None:
                    return rows
                rows[place].append(self._waiting.pop(0))
                room[place] -= size
        except StreamEnd:
            if all(rows):
                return rows
            raise

    def _samples(self, item: Mapping[str, Any]) -> list[Sample]:
        """Return the samples of an item with ids: none, one, or several if it is longer than a sequence.

        Raises PlanError for an item or a ``data`` section that samples cannot be made of.
        """
        data, roles = self._spec.data, roles_of(self._inputs, self._spec.data.inputs)
        length, tokens = length_of(self._inputs, roles), self._tokens(item)
        if data.objective != "next_token" or (tokens.is_supervised and data.packing is True):
            what = f"a stream of ids with objective: {data.objective}, packing: {data.packing}"
            raise PlanError(
                what, where="data", fix="set objective: next_token, and with labels packing: documents or false"
            )
        if data.packing is True:
            self._left = np.concatenate([self._left, tokens.ids])
            stops = range(length, len(self._left), length)
            windows = [self._left[stop - length : stop + 1] for stop in stops]
            self._left = self._left[len(stops) * length :]
            return [(window, np.ones(len(window), bool)) for window in windows]
        is_apart = not data.packing and not tokens.is_supervised and data.overlong == "cut"
        pieces = windows_of(tokens, length) if is_apart else pieces_of(tokens, length, data.overlong)
        return [pieces.of(number) for number in range(len(pieces))]

    def _tokens(self, item: Mapping[str, Any]) -> Tokens:
        if "ids" not in item or item.keys() - {"ids", "labels", "supervised"}:
            what = f"has {', '.join(map(str, item)) or 'nothing'}"
            raise self._bad(f"{what}, neither ids with labels or supervised, nor {', '.join(self._inputs)}")
        ids = self._numbers(item, "ids")
        name = next((name for name in ("labels", "supervised") if name in item), "ids")
        labels = self._numbers(item, name)
        is_label = labels != 0 if name == "supervised" else labels != NOTHING
        if len(labels) != len(ids) or (name == "labels" and (labels[is_label] != ids[is_label]).any()):
            raise self._bad(f"has {name} that are not those of its ids")
        if name != "ids" and not is_label[1:].any():
            raise self._bad("has no label behind its first token")
        marks, one = (is_label * LABEL).astype(np.uint8), np.array([len(ids)])
        source = f"item {self._taken - 1} of {self.source}"
        return Tokens(ids, one, marks, one, Tokenization("", 1 << 32), source, "", is_supervised=name != "ids")

    def _numbers(self, item: Mapping[str, Any], name: str) -> np.ndarray:
        try:
            values = np.asarray(item[name])
        except Exception as error:
            raise self._bad(f"has {name} that are no numbers: {first_line(error)}") from None
        if values.ndim != 1 or values.dtype.kind not in "iub" or not len(values):
            raise self._bad(f"has {name} of the shape {list(values.shape)} and {values.dtype}, not integers in a row")
        return values.astype(np.int64)

    def _position(self) -> dict[str, Any]:
        """Return the current position as JSON values. Raises PlanError for a ``state_dict()`` that JSON cannot hold."""
        waiting = [(ids.tolist(), is_label.astype(int).tolist()) for ids, is_label in self._waiting]
        has_state = hasattr(self._iterable, "state_dict")
        with self._users_code():
            state = json.loads(json.dumps(self._iterable.state_dict())) if has_state else None
        left = self._left.tolist()
        return {"taken": self._taken, "is_whole": self._is_whole, "state": state, "waiting": waiting, "left": left}

    def _bad(self, what: str) -> PlanError:
        return PlanError(f"item {self._taken - 1} of {self.source} {what}", where="--data", fix=_FIX)

    def _users_code(self) -> AbstractContextManager[None]:
        what = f"item {self._taken} of {self.source}, for dp rank {self._layout.dp_rank} of {self._layout.dp}"
        return refusing(what, where=lambda error: line_of(error) or "--data", fix=_FIX)
