"""The stage of each value and the values that cross each cut, given the stages of the blocks.

    anchor(node)   the block after whose start the node can run: its own block, else the latest one that it depends on
    recomputed     a value that is cheap to have everywhere: it is computed in every stage that reads it, never sent
    live(k)        values computed in a stage ≤ k and read in a stage > k: exactly these cross cut k

Recomputed are deterministic values of the batch alone (masks, rotary tables, positions, shifted labels) and, unless a
product makes them, of parameters alone (a transposed or scaled weight, a relative-position bias): sending the latter
would move a tensor and its gradient for every microbatch, while the gradients of a parameter that two stages hold are
summed once a step. A value of both (an embedded token) is sent.
"""

import operator
from collections.abc import Mapping
from functools import reduce

from torch import fx

from passes.program.ops.aten import is_random
from passes.program.program import Program
from passes.program.walks import ancestors, neighbours, readers, walk
from passes.rules.flops import has_flops

_PARAMETER, _BATCH, _SENT = 1, 2, 4


def needed_nodes(program: Program) -> set[fx.Node]:
    """Return the nodes that the loss depends on, itself included."""
    return ancestors([program.node(program.loss)])


def recomputed_nodes(program: Program) -> set[fx.Node]:
    """Return the calls that every stage with a reader computes for itself."""
    flags: dict[fx.Node, int] = {}
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            flags[node] = _PARAMETER * (node.name in program.parameters) | _BATCH * (node.name in program.inputs)
        elif node.op == "call_function":
            flag = reduce(operator.or_, (flags[n] for n in node.all_input_nodes), 0)
            # sent once it is random, reads parameters and batch, or multiplies by parameters
            is_sent = (flag & _PARAMETER and (flag & _BATCH or has_flops(node))) or is_random(node)
            flags[node] = flag | _SENT if is_sent else flag
    return {node for node, flag in flags.items() if node.op == "call_function" and not flag & _SENT}


def anchors(program: Program, block_of: Mapping[str, int], recomputed: set[fx.Node]) -> dict[fx.Node, int]:
    """Map each call to the index of a block; it runs in that block's stage. Recomputed calls have none.

    A value that depends on no block goes to the first block, unless its first reader comes later and its inputs are not
    needed sooner: then it goes there (a decoder's own embedding).
    """
    result: dict[fx.Node, int] = {}
    for node in program.graph.graph.nodes:
        if node.op == "call_function" and node not in recomputed:
            # an item of a tuple stays with the tuple, as no tuple can be sent
            own = 0 if node.target is operator.getitem else block_of.get(node.name, 0)
            result[node] = max((result[n] for n in node.all_input_nodes if n in result), default=0)
            result[node] = max(own, result[node])
    _move_late(program, block_of, recomputed, result)
    return result


def needed_anchors(program: Program, block_of: Mapping[str, int], recomputed: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the anchors of the calls that the loss depends on."""
    needed = needed_nodes(program)
    return {node: block for node, block in anchors(program, block_of, recomputed).items() if node in needed}


def _move_late(
    program: Program, block_of: Mapping[str, int], recomputed: set[fx.Node], anchor: dict[fx.Node, int]
) -> None:
    """Move each connected group of calls that no block feeds to its first reader, unless a parameter is read sooner."""
    needed = needed_nodes(program)
    calls = [node for node in anchor if node in needed]
    reading = _parameter_readers(program, recomputed, set(calls))
    for group in _groups_before_blocks(calls, block_of, recomputed):
        read_at = [
            anchor[user] for node in sorted(group) for user in node.users if user in anchor and user not in group
        ]
        target = min(read_at, default=0)
        shared = {n for names in reading.values() if names & group for n in names - group}
        if target and all(anchor[n] >= target for n in shared):
            anchor.update(dict.fromkeys(sorted(group), target))


def _groups_before_blocks(
    calls: list[fx.Node], block_of: Mapping[str, int], recomputed: set[fx.Node]
) -> list[set[fx.Node]]:
    """Return the connected groups of those calls that neither are in a block nor depend on one, in graph order."""
    free: dict[fx.Node, None] = {}
    for node in calls:
        sent = [n for n in node.all_input_nodes if n.op == "call_function" and n not in recomputed]
        if node.name not in block_of and all(n in free for n in sent):
            free[node] = None
    groups: list[set[fx.Node]] = []
    seen: set[fx.Node] = set()
    for node in free:
        if node not in seen:
            groups.append(set(walk([node], neighbours, into=lambda n: n in free)))
            seen |= groups[-1]
    return groups


def _parameter_readers(program: Program, recomputed: set[fx.Node], calls: set[fx.Node]) -> dict[str, set[fx.Node]]:
    """Parameter (by its user's name) → those of ``calls`` that read it, directly or through recomputed values."""
    found: dict[str, set[fx.Node]] = {}
    for name, fqn in program.parameters.items():
        users = program.node(name).users
        found.setdefault(fqn, set()).update(
            n for n in walk(users, readers, stop=lambda n: n not in recomputed) if n in calls
        )
    return found


def before_and_after_blocks(
    anchor: Mapping[fx.Node, int], block_of: Mapping[str, int], last_block: int
) -> tuple[set[fx.Node], set[fx.Node]]:
    """The calls that can run before the first block, and those that can run after the last: an embedding, and a loss.

    Before: calls anchored there, in no block and dependent on none. After: calls anchored to the last block, in no
    block and needed by none. An item of a tuple stays with the tuple.
    """
    before: set[fx.Node] = set()
    for node, block in anchor.items():
        calls = [n for n in node.all_input_nodes if n in anchor]
        if node.name not in block_of and block == 0 and all(n in before for n in calls):
            before.add(node)
    inside = ancestors(node for node in anchor if node.name in block_of)
    after: set[fx.Node] = set()
    for node, block in anchor.items():
        outside = block == last_block and node not in inside and node not in before
        if outside and (node.target is not operator.getitem or node.all_input_nodes[0] in after):
            after.add(node)
    return before, after


def stages_of_copies(program: Program, stage: Mapping[fx.Node, int]) -> dict[fx.Node, tuple[int, ...]]:
    """Map each placeholder or recomputed call to every stage that reads it (none if the loss does not depend on it).

    ``stage`` holds the other calls that the loss depends on.
    """
    copies: dict[fx.Node, tuple[int, ...]] = {}
    for node in reversed(program.graph.graph.nodes):
        if node.op != "output" and node not in stage:
            reading = {stage[u] for u in node.users if u in stage}
            reading.update(s for u in node.users for s in copies.get(u, ()))
            copies[node] = tuple(sorted(reading))
    return copies


def live_values(stage: Mapping[fx.Node, int], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Return for each of the ``num_stages - 1`` cuts the names of the values that cross it, in graph order.

    ``stage`` is in graph order. A value read two cuts later passes through the stage between.
    """
    cuts: list[list[str]] = [[] for _ in range(num_stages - 1)]
    for node, first in stage.items():
        last = max((stage[user] for user in node.users if user in stage), default=first)
        assert last == first or not isinstance(node.meta["val"], (tuple, list)), f"tuple {node.name} crosses a cut"
        for cut in range(first, last):
            cuts[cut].append(node.name)
    return tuple(tuple(cut) for cut in cuts)
