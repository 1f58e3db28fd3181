"""Decide for each recomputed block which saved tensors are freed, and from which values they are recomputed.

    full         all tensors that autograd saves for this block alone; the rerun begins at its inputs
    selective    tensors that are cheap for their bytes; the rerun begins at those that are kept

Values that others read (the block's outputs), and the numbers of rows that experts get, are never freed. A piece is a
block, or each of its captured parts: a CUDA graph holds its own rerun.

What a selective piece keeps are the fewest bytes from which all freed memory is cheap to recompute, a minimum cut:

    begin → m       m is made by a product with weights, an exchange, or an op too dear for its bytes
    m in → m out    the bytes of m: to cut here is to keep m
    r out → m in    a cheap call makes m of r
    m out → end     autograd keeps m for the backward

(Jain et al. 2020, "Checkmate", asks the same of memory under a budget; here the price is set by a ratio instead.)

A spec gives one kind for all blocks, or globs over their dotted names, of which the last one decides.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import fx

from passes.blocks.blocks import Blocks, Places
from passes.errors import PlanError, require
from passes.pieces import FULL, NONE, SELECTIVE, AgainCall, Piece, PieceHomes, Region
from planner.decisions import Decisions
from planner.recompute.memories import Memories, Scene, closure, sources_of
from planner.trace.lowered import Lowered
from planner.trace.trace import LetGo, StageTrace, TraceCall


def decide_recompute(asked: str | Mapping[str, str], lowered: Lowered) -> tuple[Piece, ...]:
    """The pieces of all stages that free some tensor. Raises PlanError for a glob that names no block."""
    decisions, regions = lowered.decisions, lowered.regions
    kinds = kinds_of_blocks(asked, decisions.blocks)
    pieces = pieces_of(kinds, decisions, regions)
    for stage in sorted({piece.stage for piece in pieces}):
        scene = Scene(decisions, lowered.trace(stage), PieceHomes(stage, pieces, regions))
        for piece in pieces:
            if piece.stage == stage:
                _decide(piece, Memories(scene, piece))
    return tuple(piece for piece in pieces if piece.again)


def _decide(piece: Piece, memories: Memories) -> None:
    once = {m for call in memories.calls if memories.runs_once(call) for m in memories.written(call)}
    gathers = piece.kind == FULL  # which frees what products gather, too
    hiding = [call for call in memories.calls if call.hidden]
    worth = [
        call
        for call in hiding
        if (gathers and call.changed is not None)
        or (not _stays(memories, call) and memories.cost(call) <= MOST_PER_BYTE_INSIDE * sum(call.hidden))
    ]
    kept = memories.seen | once
    if piece.kind != FULL:
        kept |= kept_memories(memories, worth)
    needed = sorted(memories.saved - kept)
    again = closure(memories, needed, worth, kept)
    insides = [c for c in again if c.hidden] if piece.kind == FULL else worth
    keys = memories.scene.keys
    piece.needed = tuple(frozenset(keys[m]) for m in needed)
    piece.kept = frozenset(key for m in kept if m in memories.maker for key in keys.get(m, ()))
    piece.insides = frozenset(name for call in insides for name in call.ops)
    piece.overwrites = frozenset(name for call in again if call.overwrites for name in call.ops)
    piece.let_go, piece.sources = frozenset(needed), frozenset(sources_of(memories, needed, again))
    piece.again = tuple(row for call in again for row in _rows(memories, call, needed, insides))


def _rows(
    memories: Memories, call: TraceCall, needed: Sequence[int], insides: Sequence[TraceCall]
) -> Iterator[AgainCall]:
    """Of each op of a call: the last gives its result. Of a call that changes a type, the change too."""
    restored = sum(memories.bytes(m) for m in memories.made(call) if m in set(needed))
    restored += sum(call.hidden) if any(call is other for other in insides) else 0
    moved = memories.moved(call)
    if call.changed is not None:
        yield AgainCall(call.name, 0 if call.ops else restored, 0, 0 if call.ops else moved, call.changed)
    for number, name in enumerate(call.ops, 1):
        is_last = number == len(call.ops)
        yield AgainCall(name, restored if is_last else 0, memories.flops_of(name), moved if is_last else 0)


def pieces_of(kinds: Mapping[int, str], decisions: Decisions, regions: Sequence[Region]) -> list[Piece]:
    """The pieces of the blocks that ``kinds`` names, with their nodes."""
    region_of = {name: region.index for region in regions if not region.refused for name in sorted(region.nodes)}
    pieces: list[Piece] = []
    for block in decisions.blocks.instances:
        if block.index not in kinds:
            continue
        parts: dict[tuple[int, int | None], list[str]] = {}
        for node in decisions.calls_of(block):
            place = decisions.stages.stage_of[node.name], region_of.get(node.name)
            parts.setdefault(place, []).append(node.name)
        for (stage, region), names in parts.items():
            pieces.append(Piece(len(pieces), stage, block.path, kinds[block.index], frozenset(names), region))
    return pieces


# Operations per freed byte. A linear of 768 features costs 384 in float32, attention scores of heads of 64
# cost 32, and an op that reads one value and writes one 16 (the bytes that it moves, at
# passes.rules.flops.FLOPS_PER_BYTE).
MOST_PER_BYTE = 128.0
# Likewise for the internal tensors of an op: scores of attention cost 20, the mask of a dropout, drawn one by one, 64.
MOST_PER_BYTE_INSIDE = 32.0
_SOURCE, _SINK = -1, -2


def kept_memories(memories: Memories, insides: list[TraceCall]) -> set[int]:
    """Memories made in the piece that are kept. ``insides``: calls that run again in any case."""
    insides = [call for call in insides if not memories.is_of_shape_alone(call)]
    runs_anyway = {id(call) for call in insides}
    begins, ends = {*memories.given, *memories.seen}, {*memories.saved, *(m for call in insides for m in call.reads)}
    feeds = list[tuple[int, int]]()
    for call in memories.calls:
        if id(call) not in runs_anyway and is_dear(memories, call):
            begins |= memories.written(call)  # a sum over ranks too, in the memory of its addend
        else:
            feeds += [(read, m) for m in memories.made(call) if m not in memories.seen for read in call.reads]
    sizes = {memory: memories.costs_to_keep(memory) for memory in (*memories.given, *memories.maker)}
    return least_cut(sizes, begins, feeds, ends) & memories.maker.keys()


def least_cut(
    sizes: Mapping[int, int], begins: Iterable[int], feeds: Iterable[tuple[int, int]], ends: Iterable[int]
) -> set[int]:
    """The memory of least ``sizes`` on all ways from ``begins`` to ``ends``, along ``feeds`` (read, made of it)."""
    import networkx as nx  # here, not above: only this needs it

    graph = nx.DiGraph()
    for memory, size in sizes.items():
        graph.add_edge(2 * memory, 2 * memory + 1, capacity=size)
    graph.add_edges_from((_SOURCE, 2 * memory) for memory in begins)
    graph.add_edges_from((2 * read + 1, 2 * made) for read, made in feeds)
    graph.add_edges_from((2 * memory + 1, _SINK) for memory in ends)
    if not graph.has_node(_SOURCE) or not graph.has_node(_SINK):
        return set()
    _, (reached, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    return {memory for memory in sizes if 2 * memory in reached and 2 * memory + 1 not in reached}


def is_dear(memories: Memories, call: TraceCall) -> bool:
    """Whether a call is not worth its bytes."""
    size = sum(map(memories.bytes, memories.made(call)))
    return _stays(memories, call) or memories.flops(call) > MOST_PER_BYTE * size


def _stays(memories: Memories, call: TraceCall) -> bool:
    """Whether a call is not run again, whatever its bytes: a product with weights, one that exchanges, or cannot."""
    is_product = bool(memories.flops(call)) and not memories.scene.weights.isdisjoint(call.reads)
    return memories.runs_once(call) or memories.exchanges(call) or is_product


def with_reruns(trace: StageTrace, pieces: Iterable[Piece]) -> StageTrace:
    """The trace with the memory that recomputed blocks free.

    forward     freed values live until the end of the block
    between     only the inputs of the rerun are held, and the tensors that autograd still saves
    backward    before the first call that reads one, its block is recomputed; each value is freed after its last reader
    """
    return replace(trace, let_go=tuple(_let_go(trace, piece) for piece in pieces if piece.stage == trace.index))


def reruns(trace: StageTrace, pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Numbers of the calls of a stage that run again; ``pieces``: of all stages."""
    again = {(call.name, call.changed) for piece in pieces if piece.stage == trace.index for call in piece.again}
    return tuple(at for at, call in enumerate(trace.calls) if (call.name, call.changed) in again)


def _let_go(trace: StageTrace, piece: Piece) -> LetGo:
    numbers = [at for at, call in enumerate(trace.calls) if not call.names.isdisjoint(piece.nodes)]
    again = reruns(trace, (piece,))
    inside = frozenset(n for n in numbers if trace.calls[n].hidden and not piece.insides.isdisjoint(trace.calls[n].ops))
    memory = _freed(trace, piece, again)
    reads = [at for at, call in enumerate(trace.calls) if at in inside or not memory.isdisjoint(call.keeps)]
    sources = frozenset(piece.sources - trace.outside)
    return LetGo(max(numbers), max(reads, default=max(numbers)), memory, sources, inside, again)


def _freed(trace: StageTrace, piece: Piece, again: Iterable[int]) -> frozenset[int]:
    """What the block frees of the memory that its calls keep, its compiled pieces too."""
    kept = {memory for call in trace.calls for memory in call.keeps}
    made = {memory for at in again for memory in trace.calls[at].makes}
    return piece.let_go & kept | (trace.saved_again & made) - piece.sources


def kinds_of_blocks(asked: str | Mapping[str, str], blocks: Blocks) -> dict[int, str]:
    """Index of each recomputed block → its kind. Raises PlanError for a glob that names no block."""
    paths = [block.path for block in blocks.instances]
    globs = {"*": asked} if isinstance(asked, str) else asked
    if globs and set(globs.values()) != {NONE} and not paths:
        raise PlanError(
            "recompute: the model has no repeated blocks", where="recompute", fix="set recompute: none, or remove it"
        )
    found: dict[int, str] = {}
    for pattern, kind in globs.items():
        hits = [block.index for block in blocks.instances if fnmatchcase(block.path, pattern)]
        if not hits and not isinstance(asked, str):
            raise _matches_nothing(pattern, paths)
        found |= dict.fromkeys(hits, kind)
    return {index: kind for index, kind in found.items() if kind != NONE}


def _matches_nothing(pattern: str, paths: list[str]) -> PlanError:
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(paths)), n=3, cutoff=0.3) or paths[:3]
    return PlanError(
        f"recompute: `{pattern}` matches no block",
        where=f"recompute.{pattern}",
        fix=f"use a glob over the names of blocks, such as {', '.join(near)}",
    )


@dataclass(frozen=True, slots=True)
class RecomputeRow:
    """``ops`` of one line run again in the backward of ``block``, on each rank of ``stage``, once a microbatch.

    ``bytes``: of the freed memory that they restore (0: intermediate values). ``flops``: of products; ``moved``:
    bytes that they read and write. ``where``: the user's module and line.
    """

    block: str
    stage: int
    kind: str
    where: str
    ops: str
    bytes: int
    flops: int
    moved: int

    def __post_init__(self) -> None:
        require(self.kind in (FULL, SELECTIVE), f"{self.block} is recomputed in the unknown way {self.kind}")
        require(min(self.bytes, self.flops, self.moved) >= 0, f"{self.ops} of {self.block} has a negative size")


def rows_of(pieces: Sequence[Piece], decisions: Decisions, places: Places) -> tuple[RecomputeRow, ...]:
    """A row for each line of each piece with a recomputed op, in the order of its first op."""
    return tuple(row for piece in pieces for row in _rows_of_piece(piece, decisions, places))


def _rows_of_piece(piece: Piece, decisions: Decisions, places: Places) -> Iterator[RecomputeRow]:
    lines: dict[str, list[AgainCall]] = {}
    for call in piece.again:
        if call.bytes or call.flops or call.moved or (call.changed is not None and call.changed.how.forward):
            lines.setdefault(places.text(decisions.program.node(call.name)), []).append(call)
    for place, calls in lines.items():
        nodes = [decisions.program.node(call.name) for call in calls]
        named = zip(calls, nodes, strict=True)
        ops = ", ".join(op_name(node) if call.changed is None else call.changed.how.name for call, node in named)
        given, flops, moved = (sum(getattr(call, key) for call in calls) for key in ("bytes", "flops", "moved"))
        yield RecomputeRow(piece.block, piece.stage, piece.kind, place, ops, given, flops, moved)


def op_name(node: fx.Node) -> str:
    """Its op without a namespace and an overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
