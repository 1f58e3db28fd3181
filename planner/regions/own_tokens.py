"""The values gathered along the sequence that are not saved for the backward of the product that reads them.

    scores = q @ gather(k)ᵀ: a saved k of all tokens would be equally large for every cp; if the backward gathers it
    again, a rank keeps only its own tokens.

The values that attention itself gathers are not among them (passes.partition.sequence.own_keys).
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from passes.partition.options.forms import Form
from passes.partition.sequence.facts import Context, Exchange
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import VIEWS
from passes.program.ops.sequence import gather_sequence
from planner.decisions import Decisions
from planner.sharding.shards import Shards

SAME_OP = {Form.WHOLE, Form.PARTS, Form.COLUMN, Form.ROW}


def keep_own_tokens(decisions: Decisions, shards: Shards) -> Context:
    """The context with exchanges that state the path of a gathered value to its reader."""
    changed = {change.value for of_stage in shards.changes for change in of_stage}
    found = [_kept_apart(decisions, exchange, changed) for exchange in decisions.context.exchanges]
    return replace(decisions.context, exchanges=tuple(found))


def _kept_apart(decisions: Decisions, exchange: Exchange, changed: set[str]) -> Exchange:
    node = decisions.program.node(exchange.node)
    if node.target is not gather_sequence or not node.meta["grad"]:
        return exchange
    way = [node]
    while len(way[-1].users) == 1 and way[-1].name not in changed:
        (reader,) = way[-1].users
        if reader.target in VIEWS:
            way.append(reader)
        elif _reads_once(decisions, reader, way[-1]):
            return replace(exchange, way=tuple(n.name for n in way), reader=reader.name)
        else:
            break
    return exchange


def _reads_once(decisions: Decisions, reader: fx.Node, value: fx.Node) -> bool:
    """Whether one product reads the value, as one operand, unchanged: with equal batch dims these two save their
    operands as they are.
    """
    is_product = reader.target in (aten.matmul.default, aten.bmm.default)
    if not is_product or not reader.meta["grad"] or len(reader.all_input_nodes) < 2:
        return False
    left, right = (shape_of(n)[:-2] for n in reader.all_input_nodes)
    is_kept = all(n.meta["grad"] for n in reader.all_input_nodes) and left == right != ()
    return is_kept and value in reader.args and decisions.placements.options[reader.name].form in SAME_OP
