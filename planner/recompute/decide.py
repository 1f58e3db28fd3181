"""Decides for each recomputed block which saved tensors are freed, and from which values they are recomputed.

    full         frees all tensors that autograd saves for this block alone; recomputation begins at the block's inputs
    selective    frees tensors that are cheap to recompute per byte; recomputation begins at kept tensors

Values that other ops read (the block's outputs), and the counts of rows per expert, are never freed. A piece is a
block, or each of its captured parts: a CUDA graph contains its own recomputation.

A selective piece keeps the fewest bytes from which all freed memory is cheap to recompute, a minimum cut:

    source → m      m is computed by a product with weights, an exchange, or an op too expensive for its bytes
    m in → m out    capacity: the bytes of m; cutting this edge keeps m
    r out → m in    a cheap call computes m from r
    m out → sink    autograd saves m for the backward

(Jain et al. 2020, "Checkmate", minimise recomputation under a memory budget; here a cost per byte decides instead.)

A spec gives one kind for all blocks, or globs over their dotted names; the last match decides.
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
    """Return the pieces of all stages that free some tensor. Raises PlanError for a glob that matches no block."""
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
    gathers = piece.kind == FULL  # full recomputation also frees the gathered inputs of products
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
    """Yield one row for the conversion of a call, if any, and one for each of its ops; the last op has the bytes."""
    restored = sum(memories.bytes(m) for m in memories.made(call) if m in set(needed))
    restored += sum(call.hidden) if any(call is other for other in insides) else 0
    moved = memories.moved(call)
    if call.changed is not None:
        yield AgainCall(call.name, 0 if call.ops else restored, 0, 0 if call.ops else moved, call.changed)
    for number, name in enumerate(call.ops, 1):
        is_last = number == len(call.ops)
        yield AgainCall(name, restored if is_last else 0, memories.flops_of(name), moved if is_last else 0)


def pieces_of(kinds: Mapping[int, str], decisions: Decisions, regions: Sequence[Region]) -> list[Piece]:
    """Return the pieces, with their nodes, of the blocks that ``kinds`` maps to a kind of recomputation."""
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
# Likewise for the internal tensors of an op: attention scores cost 20, the mask of a dropout 64.
MOST_PER_BYTE_INSIDE = 32.0
_SOURCE, _SINK = -1, -2


def kept_memories(memories: Memories, insides: list[TraceCall]) -> set[int]:
    """Return the memory of the piece that is kept. ``insides``: calls that are rerun in any case."""
    insides = [call for call in insides if not memories.is_of_shape_alone(call)]
    runs_anyway = {id(call) for call in insides}
    begins, ends = {*memories.given, *memories.seen}, {*memories.saved, *(m for call in insides for m in call.reads)}
    feeds = list[tuple[int, int]]()
    for call in memories.calls:
        if id(call) not in runs_anyway and is_dear(memories, call):
            begins |= memories.written(call)  # includes an all-reduce in place
        else:
            feeds += [(read, m) for m in memories.made(call) if m not in memories.seen for read in call.reads]
    sizes = {memory: memories.costs_to_keep(memory) for memory in (*memories.given, *memories.maker)}
    return least_cut(sizes, begins, feeds, ends) & memories.maker.keys()


def least_cut(
    sizes: Mapping[int, int], begins: Iterable[int], feeds: Iterable[tuple[int, int]], ends: Iterable[int]
) -> set[int]:
    """Return the smallest memory, by ``sizes``, on all paths from ``begins`` to ``ends``. ``feeds``: (read, made)."""
    import networkx as nx  # imported here because only this function needs it

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
    """Whether a call is too expensive to rerun for the bytes of its results."""
    size = sum(map(memories.bytes, memories.made(call)))
    return _stays(memories, call) or memories.flops(call) > MOST_PER_BYTE * size


def _stays(memories: Memories, call: TraceCall) -> bool:
    """Whether a call is never rerun: a product with weights, a collective, or one that cannot run twice."""
    is_product = bool(memories.flops(call)) and not memories.scene.weights.isdisjoint(call.reads)
    return memories.runs_once(call) or memories.exchanges(call) or is_product


def with_reruns(trace: StageTrace, pieces: Iterable[Piece]) -> StageTrace:
    """Return the trace with the memory that recomputed blocks free.

    forward     freed values live until the end of the block
    between     only the inputs of the rerun and the tensors that autograd still saves are alive
    backward    a block is recomputed before the first call that reads one of its values; each is freed after its last
    """
    return replace(trace, let_go=tuple(_let_go(trace, piece) for piece in pieces if piece.stage == trace.index))


def reruns(trace: StageTrace, pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return the indices of the calls of a stage that are rerun; ``pieces``: of all stages."""
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
    """Return the memory that the block frees, of all that its calls and compiled pieces save."""
    kept = {memory for call in trace.calls for memory in call.keeps}
    made = {memory for at in again for memory in trace.calls[at].makes}
    return piece.let_go & kept | (trace.saved_again & made) - piece.sources


def kinds_of_blocks(asked: str | Mapping[str, str], blocks: Blocks) -> dict[int, str]:
    """Return block index → kind, for recomputed blocks. Raises PlanError for a glob that matches no block."""
    paths = [block.path for block in blocks.instances]
    globs = {"*": asked} if isinstance(asked, str) else asked
    if globs and set(globs.values()) != {NONE} and not paths:
        raise PlanError(
            "recompute: the model has no repeated blocks", where="recompute", fix="set recompute: none, or remove it"
        )
    kinds: dict[int, str] = {}
    for pattern, kind in globs.items():
        hits = [block.index for block in blocks.instances if fnmatchcase(block.path, pattern)]
        if not hits and not isinstance(asked, str):
            raise _matches_nothing(pattern, paths)
        kinds |= dict.fromkeys(hits, kind)
    return {index: kind for index, kind in kinds.items() if kind != NONE}


def _matches_nothing(pattern: str, paths: list[str]) -> PlanError:
    near = difflib.get_close_matches(pattern, list(dict.fromkeys(paths)), n=3, cutoff=0.3) or paths[:3]
    return PlanError(
        f"recompute: `{pattern}` matches no block",
        where=f"recompute.{pattern}",
        fix=f"use a glob over the names of blocks, such as {', '.join(near)}",
    )


@dataclass(frozen=True, slots=True)
class RecomputeRow:
    """``ops`` of one source line that each rank of ``stage`` reruns in the backward of ``block``, once per microbatch.

    ``bytes``: freed memory that they restore (0: intermediate values); ``flops``: of products; ``moved``: bytes that
    they read and write; ``where``: the user's module and line.
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
    """Return a row for each source line of each piece with a recomputed op, in the order of its first op."""
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
        sums = (sum(getattr(call, key) for call in calls) for key in ("bytes", "flops", "moved"))
        yield RecomputeRow(piece.block, piece.stage, piece.kind, place, ops, *sums)


def op_name(node: fx.Node) -> str:
    """Return the name of a node's op without namespace and overload."""
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]
