"""The file of an executable plan: its tables, its decisions, and the buffers of the model.

    plan.save("plan.pt")        once, where the model can be captured
    Plan.load("plan.pt")        on every rank: no capture, no search, none of the model's code

It has no weights: an engine initializes them (``initialization.method: normal``) or loads them. The file is JSON and
tensors with a digest over everything, so a changed byte is an error. Nothing in it can run code: it refers only to the
names of planner.files.allowed.

    FORM digest\\n      the SHA-256 of all that follows
    length              of the JSON: 8 bytes
    JSON                {"content": …, "tensors": {name: [dtype, shape]}}
    values              of the tensors, in this order

The whole file is read and checked before a value is used; no size in it can allocate more than the size of the file.
"""

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwright import __version__
from passes.errors import PlanError, first_line
from passes.pieces import CompiledPiece, Piece, Region
from passes.program.program import Program
from planner.capture.model.assembly import of_json, to_json
from planner.capture.model.hub_format import HubFormat
from planner.capture.model.meta_init import buffer_value
from planner.decisions import Decisions
from planner.files.allowed import NotAllowed, checked, fits
from planner.files.atomic import replaced_file
from planner.files.text import parse_integer, read_bytes, refuse_constant, shorten, writing
from planner.files.values import Reader, Unstorable, Writer
from planner.saved_plan.model import ModelOwner, skeleton
from planner.sharding.buffers import buffers_at
from planner.sharding.shards import Shards
from planner.spec.spec import Spec

SUFFIX = ".pt"
FORM = "meshwright plan 6"
MOST_BYTES = 8 << 30
DECIDED = tuple(field.name for field in fields(Decisions))
PARTS: dict[str, Any] = {
    "regions": tuple[Region, ...],
    "recomputed": tuple[Piece, ...],
    "pieces": tuple[CompiledPiece, ...],
    "flops": float | None,
}
HUB = tuple(field.name for field in fields(HubFormat) if field.name not in ("names", "conversions", "adapted"))
OVER = ("constant", "selected", "cut_whole", "unsqueezed")  # marks that only planning reads, so they are not saved
SAVED_BY = "save it by meshwright plan MODEL SPEC --format pt -o FILE"
_HOUSES = Path(__file__).resolve().parents[2]
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Stored(NamedTuple):
    """The saved plan of one length. ``tables``: values of ``Plan.to_dict``; ``parts``: the fields named in PARTS."""

    tables: dict[str, Any]
    decisions: Decisions
    shards: Shards
    owner: ModelOwner
    parts: dict[str, Any]


def written_by() -> dict[str, str]:
    """Return the versions that a file depends on; only the same versions can read it."""
    return {
        "meshwright": __version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__,
        "meshwright's sources (by hash)": our_sources(),
    }


TO_WRITE = "choose a directory that exists and is writable"


def write(plans: Sequence[Stored], path: Path) -> None:
    """Write the plans of one model, one per length.

    Raises PlanError for a graph that calls a user's function, and if ``path`` cannot be written.
    """
    sealed = seal(FORM, *_content(plans))
    with writing("the plan", str(path), TO_WRITE), replaced_file(path) as file:
        file.write(sealed)


def _content(plans: Sequence[Stored]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    owner, writer = plans[-1].owner, Writer(dropped=OVER)
    try:
        for plan in plans:
            _check_constants(plan.decisions.program)
        of_lengths, model = [_of_length(plan, writer) for plan in plans], writer.write(_model_of(owner))
    except (Unstorable, NotAllowed) as error:
        raise PlanError(
            f"this plan cannot be saved to run without its model: {error}", where=SUFFIX, fix="save it as JSON"
        ) from None
    content = {
        "written by": written_by(),
        "hub": {name: getattr(owner.hub, name) for name in HUB},
        "names": {name: to_json(source) for name, source in owner.hub.stored_names.items()},
        "model": model,
        "lengths": of_lengths,
        "objects": writer.objects,
        "texts": list(writer.texts),
    }
    return content, writer.tensors


def _check_constants(program: Program) -> None:
    """Raise Unstorable unless constants are as a file restores them: contiguous, on the CPU, without a gradient."""
    for name, value in program.constants.items():
        is_plain = type(value) is Tensor and value.device.type == "cpu" and value.is_contiguous()
        if not value.is_meta and (not is_plain or value.requires_grad):
            raise Unstorable(f"the constant {name} is no plain tensor of the host")


def _of_length(plan: Stored, writer: Writer) -> dict[str, Any]:
    decisions, shards = plan.decisions, plan.shards
    return {
        "tables": plan.tables,
        "expert alone": shards.elsewhere is not None,
        "decisions": [writer.write(getattr(decisions, name)) for name in DECIDED],
        "shards": [writer.write(getattr(shards, f.name)) for f in fields(Shards) if f.name != "elsewhere"],
        "parts": [writer.write(plan.parts[name]) for name in PARTS],
    }


def _model_of(owner: ModelOwner) -> dict[str, Any]:
    """Return names, shapes, dtypes and ties of the parameters, and the values of buffers."""
    model = owner.model
    if model is None:
        raise PlanError("the planned model is gone", fix="save the plan before an Engine takes the model's weights")
    named = list(model.named_parameters(remove_duplicate=False))
    first = {id(p): name for name, p in reversed(named)}
    buffers = {name: buffer_value(model, name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return {
        "parameters": {n: (first[id(p)], list(p.shape), p.dtype, p.requires_grad) for n, p in named},
        "buffers": buffers,
        "training": model.training,
    }


def read(path: Path) -> list[Stored]:
    """Read the plans of a file. Raises PlanError if it is missing, damaged, or was written by another version."""
    file = read_bytes(path, "plan", most_bytes=MOST_BYTES, fix=SAVED_BY)
    try:
        content, tensors = unseal(FORM, file)
    except ValueError as error:
        what = f"the plan is damaged, or is no saved plan: {error}"
        raise PlanError(what, where=shorten(path), fix=SAVED_BY) from None
    del file
    try:
        _check_writer(content["written by"], path)
        return _all_stored(content, tensors)
    except PlanError:
        raise
    except Exception as error:  # a damaged file may cause an error of any kind
        raise PlanError(f"the plan is damaged: {first_line(error)}", where=shorten(path), fix=SAVED_BY) from None


def _check_writer(then: Mapping[str, str], path: Path) -> None:
    for what, value in written_by().items():
        if then.get(what) != value:
            what = f"the plan was saved with another {what}: {shorten(then.get(what), 20)}, here {value[:20]}"
            raise PlanError(what, where=shorten(path), fix=SAVED_BY)


def _all_stored(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Stored]:
    reader = Reader(content["objects"], content["texts"], tensors)
    hub: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in content["hub"].items()}
    hub["names"] = {name: of_json(source) for name, source in content["names"].items()}
    model = _skeleton_of(reader.read(content["model"]), frozenset(hub["persistent_buffers"]))
    plans = [_stored(of_length, reader, ModelOwner(model, checked(HubFormat, hub))) for of_length in content["lengths"]]
    if not plans:
        raise ValueError("it has no lengths")
    return plans


def _stored(content: Mapping[str, Any], reader: Reader, owner: ModelOwner) -> Stored:
    decided = dict(zip(DECIDED, map(reader.read, content["decisions"]), strict=True))
    decisions = checked(Decisions, decided)
    names = [field.name for field in fields(Shards) if field.name != "elsewhere"]
    shards = checked(Shards, dict(zip(names, map(reader.read, content["shards"]), strict=True)))
    if content["expert alone"]:
        spec = Spec.load({**content["tables"]["spec"], "cluster": None})
        shards = replace(shards, elsewhere=partial(buffers_at, spec, decisions))
    parts: dict[str, Any] = dict(zip(PARTS, map(reader.read, content["parts"]), strict=True))
    for name, kind in PARTS.items():
        if not fits(parts[name], kind):
            raise TypeError(f"{name} must not be a {type(parts[name]).__name__}")
    return Stored(content["tables"], decisions, shards, owner, parts)


def _skeleton_of(model: Mapping[str, Any], persistent: frozenset[str]) -> nn.Module:
    parameters: dict[str, nn.Parameter] = {}
    for name, (first, shape, dtype, requires_grad) in model["parameters"].items():
        empty = torch.empty(shape, dtype=dtype, device="meta")
        parameters[name] = parameters[first] if first in parameters else nn.Parameter(empty, requires_grad)
    return skeleton(parameters, model["buffers"], persistent).train(model["training"])


@lru_cache(1)
def our_sources() -> str:
    """Return the SHA-256 of the sources of planner and passes."""
    digest = hashlib.sha256()
    for path in sorted(path for house in ("planner", "passes") for path in (_HOUSES / house).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_HOUSES)}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def seal(form: str, content: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a file. ``form``: the name of its format, one line of text."""
    shapes = {name: (str(value.dtype), list(value.shape)) for name, value in tensors.items()}
    text = json.dumps({"content": content, "tensors": shapes}, allow_nan=False).encode()
    parts = len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join((f"{form} {digest.hexdigest()}\n".encode(), *parts))


def unseal(form: str, file: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return content and tensors, which do not share memory with ``file``. Raises ValueError if the file is damaged or
    has another format."""
    head, _, rest = file.partition(b"\n")
    own_form, _, digest = head.decode(errors="replace").rpartition(" ")
    if own_form != form:
        raise ValueError("its format is another, or its digest")
    if digest != hashlib.sha256(rest).hexdigest():
        raise ValueError("its bytes have changed: the digest is another")
    start = 8 + int.from_bytes(rest[:8], "little")
    try:
        values = json.loads(rest[8:start], parse_int=parse_integer, parse_constant=refuse_constant)
        content, shapes = values["content"], values["tensors"]
        tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in shapes.items():
            tensors[name], start = _tensor(rest, start, _DTYPES[dtype], shape)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if start != len(rest):
        raise ValueError("it has other sizes than it says")
    return content, tensors


def _bytes_of(value: Tensor) -> memoryview:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _tensor(file: bytes, start: int, dtype: torch.dtype, shape: list[int]) -> tuple[Tensor, int]:
    """Return the tensor at byte ``start`` of ``file``, and the byte after it."""
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no tensor has the shape {shape}")
    end = start + math.prod(shape) * dtype.itemsize
    if end > len(file):
        raise ValueError("a tensor is larger than the file")
    value = torch.empty(shape, dtype=dtype)
    _bytes_of(value)[:] = file[start:end]
    return value, end
