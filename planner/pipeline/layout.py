"""The text form of a pipeline layout: the layers of each stage, with the embedding and the loss among them.

    Et*3|t*4|tL        three stages: the embedding and three blocks, four blocks, a block and the loss
    Et|(tt|)*6,tL      eight stages: (…)*n repeats its content n times, commas are ignored

    layout = part…             part = thing | thing * n           thing = E | t | m | L | "|" | ( part… )

E is the embedding (the ops before the blocks), t a block, L the ops from the last block to the loss, and m a
layer of multi-token prediction. A bar ends a stage; nothing between two bars is an empty stage.

Every notation of the spec is converted to a layout:

    [6, 6]                      blocks of each stage, in model order
    [[3, 3], [2, 4]]            one list per pp rank: the blocks of each of its chunks
    {first: 4, last: 5}         4 blocks on the first rank, 5 on the last one, the others evenly
    {embedding: true}           evenly, with the embedding (or the loss) counted as a block

Evenly means without a remainder: the blocks (with embedding and loss, if they count) must divide by the remaining
ranks, and the blocks of a rank by its chunks. `auto`, the default, balances the costs of stages instead.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from passes.errors import PlanError
from planner.fold import LOOP, Fold, rank_of

KEY = "pipeline.split"
WORDS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # the same letters, written out
LETTERS = "".join(WORDS.values())
PATTERN = rf"^[{LETTERS}|()*,0-9]+$"  # matches every layout, and more; for editors
_HELP = "write E (embedding), t (a block) and L (loss), `|` between stages, `*n` after a repeated part: Et*3|t*4|tL"
_MOST_DEPTH = 100  # of nested brackets
_MOST = 100_000  # layers and bars: a larger layout is a typo in a number


class Mark(NamedTuple):
    """A letter or a bar of a layout, and the index of its character in the text."""

    letter: str
    at: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers of each stage, and the character index at which each stage ends: its bar, or the end of the text."""

    text: str
    stages: tuple[tuple[Mark, ...], ...]
    ends: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        return [sum(mark.letter == "t" for mark in stage) for stage in self.stages]

    @property
    def blocks(self) -> list[range]:
        """Block indices of each stage, counted over the whole model."""
        return [range(end - size, end) for size, end in zip(self.sizes, accumulate(self.sizes), strict=True)]

    def stage_of(self, letter: str) -> int:
        """Return the stage of the first layer with this letter."""
        return next(s for s, stage in enumerate(self.stages) for mark in stage if mark.letter == letter)

    def check_num_blocks(self, num_blocks: int) -> None:
        """Raise PlanError unless the layout has ``num_blocks`` t."""
        marks = [mark for stage in self.stages for mark in stage]
        blocks = [mark for mark in marks if mark.letter == "t"]
        if len(blocks) != num_blocks:
            too_many = len(blocks) > num_blocks
            at = blocks[num_blocks].at if too_many else marks[-1].at
            what = f"{KEY} has {len(blocks)} blocks (t), but the model has {num_blocks}"
            raise complaint(self.text, at, what, f"write {num_blocks} t in total; t*4 stands for four")


def parse_layout(text: str) -> Layout:
    """Parse ``text`` without checking the order of its layers. Raises PlanError at the first invalid character."""
    marks = _Reader(text).all()
    stages: list[list[Mark]] = [[]]
    ends: list[int] = []
    for mark in marks:
        if mark.letter == "|":
            stages.append([])
            ends.append(mark.at)
        else:
            stages[-1].append(mark)
    return Layout(text, tuple(map(tuple, stages)), (*ends, max(len(text) - 1, 0)))


def read_layout(text: str) -> Layout:
    """Parse ``text`` and require one E before all blocks and one L after them. Raises PlanError."""
    layout = parse_layout(text)
    marks = [mark for stage in layout.stages for mark in stage]
    for mark in marks:
        if mark.letter == "m":
            what = f"{KEY}: multi-token prediction (m) is not supported: models have only a loss (L)"
            raise complaint(text, mark.at, what, "remove m; terms that a model adds to its loss belong to L")
    for letter, word, place in (("E", "embedding", 0), ("L", "loss", -1)):
        places = [mark for mark in marks if mark.letter == letter]
        order = "first" if place == 0 else "last"
        if len(places) > 1:
            raise complaint(text, places[1].at, f"{KEY}: a second {word} ({letter})", f"write one {letter}")
        if not places or marks[place] is not places[0]:
            at = marks[place].at if marks else 0
            what = f"{KEY}: the {order} layer must be the {word} ({letter})"
            raise complaint(text, at, what, f"write {letter} {'before' if place == 0 else 'after'} all other layers")
        if not layout.stages[place]:
            at = layout.ends[0] if place == 0 else layout.ends[-1]
            what = f"{KEY}: the {order} stage is empty, but the {word} ({letter}) runs there"
            raise complaint(text, at, what, f"remove the {order} bar, or put {letter} {order}")
    return layout


def layout_of_sizes(sizes: Sequence[int]) -> Layout:
    """Return the layout with these blocks per stage, the embedding on the first stage and the loss on the last."""
    blocks = "|".join(f"t*{size}" if size > 1 else "t" * size for size in sizes)
    return parse_layout(f"E{blocks}L")


def spelled(stages: Sequence[Sequence[str]]) -> str:
    """Return the text of a layout in words: ``Et|L`` for ``[[embedding, decoder], [loss]]``."""
    return "|".join("".join(WORDS[word] for word in stage) for stage in stages)


def complaint(text: str, at: int, what: str, fix: str = _HELP) -> PlanError:
    """Return a PlanError that shows ``text``, or the part around ``at`` if it is long, with a caret under ``at``."""
    first = max(0, at - 60)
    shown = f"{'…' * (first > 0)}{text[first : first + 110]}{'…' * (len(text) > first + 110)}"
    pointer = " " * (at - first + (first > 0)) + "^"
    return PlanError(f"{what}, at character {at + 1}\n    {shown}\n    {pointer}", where=KEY, fix=fix)


class _Reader:
    """A parser that reads a layout from left to right. ``at``: index of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def all(self) -> list[Mark]:
        marks = self.parts()
        if self.at < len(self.text):
            raise self.error(
                "this closing bracket has no opening one",
                "remove it, or add the opening one before the repeated part: (tt|)*3",
            )
        return marks

    def parts(self, opened: int | None = None) -> list[Mark]:
        """Parse up to the bracket that closes the one at ``opened``, or to the end of the text."""
        marks: list[Mark] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            marks += self.part()
            if len(marks) > _MOST:
                raise self.error(f"more than {_MOST} layers and bars", "check the numbers after *", self.at - 1)
        if opened is not None and self.at == len(self.text):
            raise self.error(
                "this bracket is never closed", "close it and write the number of repetitions: (tt|)*3", opened
            )
        return marks

    def part(self) -> list[Mark]:
        start, letter = self.at, self.text[self.at]
        self.at += 1
        if letter == ",":
            return []
        if letter == "(":
            if self.depth == _MOST_DEPTH:
                raise self.error(f"brackets are nested more than {_MOST_DEPTH} deep", "write it without nesting", start)
            self.depth += 1
            marks = self.parts(start)
            self.depth -= 1
            self.at += 1
            if self.text[self.at : self.at + 1] != "*":
                raise self.error("a number of repetitions must follow the bracket", "write (…)*n", self.at - 1)
        elif letter in LETTERS or letter == "|":
            marks = [Mark(letter, start)]
        else:
            raise self.error(f"`{letter}` is not a layer", _HELP, start)
        return self.repeated(marks)

    def repeated(self, marks: list[Mark]) -> list[Mark]:
        if self.text[self.at : self.at + 1] != "*":
            return marks
        digits = re.compile("[0-9]+").match(self.text, self.at + 1)
        if not digits or not int(digits[0][:9]):
            raise self.error("a number of repetitions must follow `*`", "write a number of 1 or more: t*3")
        times = int(digits[0][:9])
        if times * len(marks) > _MOST:
            raise self.error(f"more than {_MOST} layers and bars", "write a smaller number", digits.start())
        self.at = digits.end()
        return marks * times

    def error(self, what: str, fix: str, at: int | None = None) -> PlanError:
        return complaint(self.text, min(self.at if at is None else at, len(self.text) - 1), f"{KEY}: {what}", fix)


AUTO = "auto"


def stage_problems(split: Any, pp: int, vpp: int) -> Iterator[PlanError]:
    """Yield an error if ``split`` has too many or too few stages. This check does not need the model."""
    stages = f"mesh.pp · mesh.vpp = {pp} · {vpp} = {pp * vpp}"
    if isinstance(split, str) and split != AUTO:
        layout = read_layout(split)
        if len(layout.stages) != pp * vpp:
            at = layout.ends[min(len(layout.stages), pp * vpp) - 1]
            fix = f"write {pp * vpp - 1} `|`: each one ends a stage"
            yield complaint(split, at, f"{KEY} has {len(layout.stages)} stages, {stages}", fix)
    elif _is_rows(split):
        if len(split) != pp or any(not isinstance(row, Sequence) or len(row) != vpp for row in split):
            what = f"{KEY} {_plain(split)} is not a list of {pp} lists (ranks) of {vpp} numbers (chunks)"
            yield PlanError(what, where=KEY, fix=f"give {pp} lists of {vpp} numbers of blocks each, or write auto")
    elif isinstance(split, Sequence) and split != AUTO and len(split) != pp * vpp:
        fix = f"list {pp * vpp} numbers of blocks, or write auto"
        yield PlanError(f"{KEY} has {len(split)} stages, {stages}", where=KEY, fix=fix)


def layout_of(split: Any, pp: int, vpp: int, num_blocks: int, fold: Fold = LOOP) -> Layout:
    """Return the layout of ``split`` (not auto) for a model. Raises PlanError if it does not fit the model."""
    for problem in stage_problems(split, pp, vpp) if isinstance(split, str) or _is_rows(split) else ():
        raise problem
    if isinstance(split, str):
        layout = read_layout(split)
        layout.check_num_blocks(num_blocks)
        return layout
    if isinstance(split, Sequence):
        sizes = by_stage(split, fold) if _is_rows(split) else list(split)
        _check_sizes(split, sizes, pp * vpp, num_blocks)
        return layout_of_sizes(sizes)
    return layout_of_sizes(by_stage(even_split(num_blocks, pp, vpp, fold, split), fold))


def may_be_alone(split: Any) -> bool:
    """Whether ``split`` allows a stage with only the embedding or only the loss."""
    if isinstance(split, str):
        return split == AUTO or not all(read_layout(split).sizes)
    return not isinstance(split, Sequence) and (split.embedding or split.loss)


def by_stage(sizes_of_ranks: Sequence[Sequence[int]], fold: Fold = LOOP) -> list[int]:
    """Return the number of blocks of each stage, from those of each chunk of each rank."""
    pp, num_stages = len(sizes_of_ranks), sum(map(len, sizes_of_ranks))
    return [sizes_of_ranks[rank_of(s, pp, fold)][s // pp] for s in range(num_stages)]


def even_split(num_blocks: int, pp: int, vpp: int, fold: Fold, ends: Any) -> list[list[int]]:
    """Return, for each pp rank, the number of blocks of each of its chunks. ``ends``: the spec's EvenSplit. Raises
    PlanError if a division leaves a remainder.
    """
    fixed = [n for n in (ends.first, ends.last) if n is not None]
    if ends.embedding or ends.loss:
        if fixed:
            raise _problem("embedding and loss count as blocks only if first and last are not given", "keep one")
        return _with_ends(num_blocks, pp, vpp, fold, ends.embedding, ends.loss)
    ranks, blocks = pp - len(fixed), num_blocks - sum(fixed)
    between = f"{blocks} blocks of {num_blocks}" if fixed else f"{num_blocks} blocks"
    if ranks < 0 or blocks < 0 or (blocks % ranks if ranks else blocks):
        what = f"{between} are left for {ranks} ranks" if fixed else f"{between} do not divide by {pp} pipeline ranks"
        raise _problem(what, "write auto, or a layout with the number of blocks of each stage")
    sizes = [blocks // ranks if ranks else 0] * pp
    if ends.first is not None:
        sizes[0] = ends.first
    if ends.last is not None:
        sizes[-1] = ends.last
    return [_in_chunks(size, rank, vpp) for rank, size in enumerate(sizes)]


def _with_ends(num_blocks: int, pp: int, vpp: int, fold: Fold, embedding: bool, loss: bool) -> list[list[int]]:
    """Split evenly with the embedding on the first stage and the loss on the last, each in place of one block."""
    total = num_blocks + embedding + loss
    if total % pp:
        counted = " + ".join([f"{num_blocks} blocks", *["embedding"] * embedding, *["loss"] * loss])
        raise _problem(f"{counted} = {total} do not divide by {pp} pipeline ranks", "write auto, or a layout")
    sizes = [_in_chunks(total // pp, rank, vpp) for rank in range(pp)]
    sizes[0][0] -= embedding
    sizes[rank_of(pp * vpp - 1, pp, fold)][-1] -= loss
    return sizes


def _in_chunks(size: int, rank: int, vpp: int) -> list[int]:
    if size % vpp:
        raise _problem(
            f"the {size} blocks of rank {rank} do not divide by {vpp} chunks", "change vpp, or write a layout"
        )
    return [size // vpp] * vpp


def _check_sizes(split: Sequence[Any], sizes: list[int], num_stages: int, num_blocks: int) -> None:
    entry = f"{KEY} {_plain(split)}"
    fix = f"give {num_stages} positive numbers of blocks that add up to {num_blocks}, or `auto`"
    if len(sizes) != num_stages:
        raise PlanError(f"{entry} has {len(sizes)} entries for {num_stages} stages", where=KEY, fix=fix)
    if any(not isinstance(n, int) or n < 1 for n in sizes):
        fix = f"{fix}, or a layout that gives the embedding or the loss a stage of its own: E|t*{num_blocks}L"
        raise PlanError(f"{entry} leaves a stage without blocks", where=KEY, fix=fix)
    if sum(sizes) != num_blocks:
        raise PlanError(f"{entry} adds up to {sum(sizes)}, but the model has {num_blocks} blocks", where=KEY, fix=fix)


def _is_rows(split: Any) -> bool:
    return not isinstance(split, str) and isinstance(split, Sequence) and any(isinstance(n, Sequence) for n in split)


def _plain(split: Sequence[Any]) -> list[Any]:
    return [list(n) if isinstance(n, Sequence) else n for n in split]


def _problem(what: str, fix: str) -> PlanError:
    return PlanError(f"{KEY}: {what}", where=KEY, fix=fix)
