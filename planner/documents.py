"""Checks ``packing: documents``: no value of a document may depend on a token of another document.

The check runs the program of a short sequence with two documents (passes.partition.sequence.crossing).
"""

from collections.abc import Callable, Mapping, Sequence
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from passes.errors import PlanError
from passes.moe.find import find_experts
from passes.partition.sequence.borders import end_at_borders
from passes.partition.sequence.crossing import crossing
from passes.partition.sequence.facts import op
from passes.program.ops.aten import aten, shape_of
from passes.program.ops.groups import ATTENTION
from passes.program.program import Program
from passes.program.source_lines import where_of
from passes.program.walks import readers, walk
from planner.spec.inputs import TELLING, role_of

SHORT = 272  # tokens: attention over them takes milliseconds, and few models have a width of this size
LABELS = ("labels", "next_tokens", "attention_mask")
Inputs = Mapping[str, Tensor]


def check_documents(
    model: nn.Module, inputs: Inputs, given: Mapping[str, str], program_of: Callable[[Inputs], Program]
) -> bool:
    """Return whether ``kept_apart`` must end the model's scans and convolutions at the ends of documents.

    ``inputs``: of one microbatch, without values; if none marks documents, nothing is checked here, and the objective
    refuses the inputs. ``given``: the spec's ``data.inputs``. ``program_of``: captures the program of such inputs.
    Raises PlanError, with the source line, for an op by which the loss of a document depends on another.
    """
    roles = {name: role_of(name, given) for name in inputs}
    names = [name for name, role in roles.items() if role in TELLING]
    tokens = next((x.shape[1] for name, x in inputs.items() if roles[name] != "cu_seqlens" and x.dim() == 2), 0)
    if not names or tokens < 2:
        return False
    used = inputs if tokens <= SHORT else _shortened(inputs, tokens)
    found, length = program_of(used), min(tokens, SHORT)
    first = next(n for n in range(length // 2, 0, -1) if gcd(n, length) == 1)  # no boundary of equal chunks
    homes = torch.where(torch.arange(length) < first, 1, 2)
    batch = _values(used, roles, homes)
    tokens_too = {n for p, n in found.inputs.items() if roles[n] in LABELS and _is_embedded(found, p)}
    by_placeholder = {p: batch[n] for p, n in found.inputs.items() if n in batch and n not in tokens_too}
    held = {name: x.detach().cpu() for name, x in model.named_buffers(remove_duplicate=False) if not x.is_meta}
    tensors = {p: held[name] for p, name in found.buffers.items() if name in held}
    experts = find_experts(found).layers
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        node = crossing(found, homes, by_placeholder, tensors, experts)
        changes = node is not None and kept_apart(found, given)
        if changes:
            node = crossing(found, homes, by_placeholder, tensors, experts, repeats=True)
    if node is not None:
        raise _refused(node, names)
    return changes


def kept_apart(program: Program, given: Mapping[str, str]) -> bool:
    """End scans and convolutions at the ends of documents, in place; return whether there are any."""
    roles = {p: role_of(name, given) for p, name in program.inputs.items()}
    positions = [p for p, role in roles.items() if role == "positions" and len(shape_of(program.node(p))) == 2]
    return bool(positions) and end_at_borders(program, positions[0])


def telling_values(begins: Tensor, num_ends: int) -> dict[str, Tensor]:
    """Return the inputs that mark documents, by role. ``begins`` [b, length]: whether a token begins a document."""
    length = begins.shape[1]
    places, numbers = torch.arange(length).expand(begins.shape), begins.long().cumsum(-1) - 1
    same = numbers[:, :, None] == numbers[:, None, :]
    starts = torch.where(begins, places, length).sort(-1).values
    return {
        "documents": numbers,
        "positions": places - torch.where(begins, places, 0).cummax(-1).values,
        "document_mask": same.tril()[:, None],
        "cu_seqlens": F.pad(starts, (0, max(0, num_ends - length)), value=length)[:, :num_ends],
    }


def _shortened(inputs: Inputs, tokens: int) -> Inputs:
    sizes = {name: [x.shape[0], *(SHORT if n == tokens else n for n in x.shape[1:])] for name, x in inputs.items()}
    return {name: torch.empty(size, dtype=inputs[name].dtype, device="meta") for name, size in sizes.items()}


def _values(inputs: Inputs, roles: Mapping[str, str | None], homes: Tensor) -> dict[str, Tensor]:
    """Return values of all inputs except tokens, for sequences of two documents."""
    begins = F.pad(homes.diff(), (1, 0), value=1).bool()
    values = {}
    for name, x in inputs.items():
        if roles[name] in TELLING:
            marks = telling_values(begins.expand(x.shape[0], -1), x.shape[1])[str(roles[name])]
            values[name] = marks.to(x.dtype)
        elif roles[name] in LABELS:
            values[name] = torch.ones(x.shape, dtype=x.dtype)
    return values


def _is_embedded(program: Program, placeholder: str) -> bool:
    """Return whether an embedding reads this input, as that of a decoder reads labels."""
    below = walk([program.node(placeholder)], readers, into=_holds_integers)
    return any(user.target is aten.embedding.default for node in below for user in node.users)


def _holds_integers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


def _refused(node: fx.Node, names: Sequence[str]) -> PlanError:
    if node.target in ATTENTION:
        what = f"this attention does not read {' or '.join(names)}: tokens attend over the ends of documents"
        fix = (
            "mask other documents in the model (Hugging Face models do, with position_ids and use_cache: false in "
            "their config); or set data.packing: false, or true"
        )
    else:
        what = f"{op(node)} lets a token change the loss of another document in its sequence"
        fix = (
            "use several lengths instead of packing: data: {packing: false}, and a list of lengths in the shape of "
            f"each input, such as [[256, 1024]]; or mask other documents in the model, by {' or '.join(names)}"
        )
    return PlanError(what, where=where_of(node), fix=fix)
