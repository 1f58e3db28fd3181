"""Schedules by hand: forwards alone, an order of both directions, and orders that are drawn."""

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from hypothesis import strategies as st

from planner.fold import Fold, V, stage_of
from planner.pipeline.actions import Action, Order, needs
from planner.pipeline.message_slots import SlotKey, slots_by_kind
from planner.pipeline.schedule import CUSTOM, FORWARD_ONLY, Schedule, build_schedule
from planner.pipeline.zero_bubble import StageCosts


def schedules() -> st.SearchStrategy[Schedule]:
    sizes = st.tuples(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 12), st.just(1))
    groups = st.tuples(st.just("interleaved_1f1b"), st.integers(2, 4), st.integers(1, 4), st.integers(2, 4))
    interleaved = groups.map(lambda g: (g[0], g[1], g[1] * g[2], g[3]))
    return st.one_of(sizes, interleaved).map(lambda arguments: build_schedule(*arguments))


@st.composite
def costed_pipelines(draw: st.DrawFn, vpp: int) -> tuple[int, int, StageCosts]:
    """A number of ranks, of microbatches, and what each of the ranks' chunks costs."""
    pp = draw(st.integers(2, 6))
    numbers = st.lists(st.integers(0, 12).map(float), min_size=vpp * pp, max_size=vpp * pp)
    costs = StageCosts(draw(numbers.map(lambda n: [x + 4 for x in n])), draw(numbers), draw(numbers))
    return pp, draw(st.integers(1, 3 * pp + 1)), costs


def held(schedule: Schedule) -> list[int]:
    """Of each rank the most pairs between their F and their W, or their B where there are no W."""
    last = "W" if schedule.has_weights else "B"
    return [
        max(accumulate((action.kind == "F") - (action.kind == last) for action in order)) for order in schedule.orders
    ]


def forward_only(schedule: Schedule) -> Schedule:
    """As an evaluation runs it."""
    s = schedule
    orders = tuple(tuple(a for a in order if a.kind == "F") for order in s.orders)
    return Schedule(FORWARD_ONLY, s.pp, s.vpp, s.num_microbatches, s.group_size, orders, s.fold)


def both_ways(pp: int, num_microbatches: int) -> Schedule:
    """Over a v, in the manner of DualPipeV: a rank takes in turn a forward of one chunk and a backward of the other.

    At least 2 · pp microbatches.
    """
    orders = tuple(_both_ways(pp, rank, num_microbatches) for rank in range(pp))
    return Schedule(CUSTOM, pp, 2, num_microbatches, pp, orders, V)


def _both_ways(pp: int, rank: int, num_microbatches: int) -> Order:
    behind, order, waiting = pp - rank - 1, list[Action](), list[Action]()
    done = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}

    def run(*works: tuple[str, int], later: bool = False) -> None:
        for kind, chunk in works:
            action = Action(kind, done[kind, chunk], chunk)
            done[kind, chunk] += 1
            order.append(action)
            waiting.extend([action._replace(kind="W")] * (kind == "B"))
            if kind == "B" and not later:
                order.append(waiting.pop(0))

    down, up, back, home = ("F", 0), ("F", 1), ("B", 1), ("B", 0)
    run(*[down] * (2 * behind), *[down, up] * (rank + 1), *[back, up] * behind)
    run(*[down, back, up, home] * (num_microbatches - 2 * pp + rank + 1), *[back, up, home] * behind)
    for i in range(rank + 1):
        run(back, home, later=i >= (rank + 1) // 2)
    for _ in range(behind):
        order.extend(waiting[:1])
        del waiting[:1]
        run(home, later=True)
    return (*order, *waiting)


def drawn_schedule(seed: int, pp: int, vpp: int, num_microbatches: int, fold: Fold, *, has_weights: bool) -> Schedule:
    """An order of all actions in which each has what it needs, dealt to the ranks: they run to their end."""
    random, num_stages, done = Random(seed), pp * vpp, set[tuple[str, int, int]]()
    left = [(kind, m, s) for kind in ("FBW" if has_weights else "FB") for m in range(num_microbatches)
            for s in range(num_stages)]  # fmt: skip
    place = {stage_of(rank, c, pp, fold): (rank, c) for rank in range(pp) for c in range(vpp)}
    orders: list[list[Action]] = [[] for _ in range(pp)]
    while left:
        event = random.choice([e for e in left if done.issuperset(needs(*e, num_stages))])
        kind, microbatch, stage = event
        rank, chunk = place[stage]
        orders[rank].append(Action(kind, microbatch, chunk))
        left.remove(event)
        done.add(event)
    return Schedule(CUSTOM, pp, vpp, num_microbatches, pp, tuple(map(tuple, orders)), fold)


def input_slots(order: Order, num_layers: Sequence[int] = ()) -> dict[SlotKey, int]:
    """The static input buffer of each (microbatch, chunk, layer) if all layers have inputs of one signature.

    ``num_layers[chunk]`` layers a chunk; without it, one.
    """
    chunks = {action.chunk for action in order}
    return slots_by_kind(order, {chunk: [None] * (num_layers[chunk] if num_layers else 1) for chunk in chunks})


def graph_slots(order: Order, num_layers: Sequence[int]) -> dict[SlotKey, int]:
    """Which pair of graphs, forward and backward, runs each (microbatch, chunk, layer): a pair has one layer."""
    return slots_by_kind(order, [[(chunk, i) for i in range(n)] for chunk, n in enumerate(num_layers)])
