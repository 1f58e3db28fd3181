"""The manifest of a save: one JSON file with the saved tensors and the place of each element, written last.

    {"checksum": "…", "manifest": {"step": 12, "files": […], "tensors": {name: {shape, values, pieces}}, …}}

The checksum covers the bytes of the manifest, which contains those of the files: any flipped bit is detected. Checksums
are 128-bit XXH3, which is as fast as memory on any CPU; SHA-256 without hardware support would be slower than the disk.
They detect accidents, not attacks: a writer of the checkpoint can also write its checksums.

The input is untrusted: sizes are checked before memory is allocated, and names before paths are built.
"""

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, FailFast, Field, JsonValue, ValidationError

from meshwright import __version__
from passes.errors import PlanError
from planner.capture.model.assembly import Assembly, of_json, sources
from planner.capture.model.eager import plain_name
from planner.files.atomic import write_new
from planner.sharding.boxes import Box, num_corners, tiles
from runtime.checkpoint.lines import NO_LINE, Line, SavePosition
from runtime.checkpoint.safetensors_files import bad_save, read_small

MANIFEST, FORMAT, VERSION = "manifest.json", "meshwright checkpoint", 4
WITH_NAMES = 4
_READ = (1, 2, 3, VERSION)  # 1: without lines; 2: without adapters; 3: without names and files of the Hub
MAX_BYTES = 32 << 20  # some 100,000 parameters; parsed, it takes less than 1 GB with any content
_LATER = {"meshwright", "line", "adapters", "stored_names", "model_files"}  # fields that earlier versions lack
_MOST = {b"[": 1_500_000, b"{": 500_000, b'"': 4_000_000}  # enough for 100,000 parameters in several pieces
_MAX_CORNERS = 2_000_000
_HEAD, _MIDDLE, _TAIL = b'{"checksum": "', b'", "manifest": ', b"}\n"
_DIGITS = 32
STATISTICS = {"row_var", "col_var"}  # in saves of earlier versions with adafactor: their weights can be read
NO_OPTIMIZER = "none"  # the optimizer of a save of weights alone

Size = Annotated[int, Field(ge=0, le=2**48)]
Sizes = Annotated[tuple[Size, ...], Field(max_length=8)]
# parameter, main, ema, buffer, or a moment by its name in the update rule
Kind = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Axis = Literal["tp", "pp", "vpp", "dp", "cp", "ep", "etp", "edp"]
DType = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class FileEntry(_Strict):
    """One file of a rank: its size and the checksum of all its bytes."""

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}\.safetensors$")]
    bytes: Size
    checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ModelFile(_Strict):
    """A file beside the model's weights, such as a tokenizer (runtime.checkpoint.model_files). No path is built from
    its name.
    """

    name: Annotated[str, Field(max_length=600)]
    bytes: Size
    checksum: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class TensorEntry(_Strict):
    """A parameter or buffer: its full shape, the dtype of each stored kind of values, and their places in files.

    ``pieces``: (index of the file, start, stop) of boxes that hold each element of the full shape once.
    """

    shape: Sizes
    values: dict[Kind, DType]
    aliases: Annotated[tuple[str, ...], FailFast()] = ()
    pieces: Annotated[tuple[tuple[Size, Sizes, Sizes], ...], FailFast()]

    @property
    def boxes(self) -> list[Box]:
        return [Box(start, stop) for _, start, stop in self.pieces]

    @property
    def is_statistic(self) -> bool:
        """Whether the tensor holds values of the rows or columns of a parameter."""
        return self.values.keys() <= STATISTICS


class OptimizerEntry(_Strict):
    """The optimizer. ``updates``: number of updates that were not skipped; from the first on there are moments.
    ``rested``: smaller numbers of parameters that no row chose in some steps.
    """

    name: str
    updates: Size
    rested: dict[str, Size] = Field(default_factory=dict)


class LossScaleEntry(_Strict):
    """The loss scale, and the number of good steps since it last changed."""

    scale: float
    num_good: Size


class AdaptersEntry(_Strict):
    """The adapters of peft: the config of each, and the hash of its modules' settings
    (planner.capture.model.hub_format).
    """

    configs: dict[str, dict[str, JsonValue]]
    modules: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(_Strict):
    """The contents of a save. ``mesh``, ``order``, ``zero``, ``seed``: of the run; a run with others can load the save.

    ``meshwright``: the version that wrote it, "" before 0.2.0.
    ``line``: the line of saves that it continues (``runtime.checkpoint.lines``).
    ``texts``: config files by name.
    ``stored_names``: name in files of the Hub → assembly of these tensors, unless it is one of them.
    ``model_files``: files that the run keeps beside its saves.
    """

    format: Literal["meshwright checkpoint"] = FORMAT
    version: Literal[1, 2, 3, 4] = VERSION
    meshwright: str = ""
    step: Size
    line: Line = Line(id=NO_LINE)
    written: Annotated[str, Field(pattern=r"^[0-9T:+.-]{10,40}$")]
    mesh: dict[Axis, Size]
    order: Annotated[str, Field(pattern=r"^[a-z-]{2,40}$")]
    zero: Size
    seed: int
    optimizer: OptimizerEntry
    loss_scale: LossScaleEntry | None
    files: Annotated[tuple[FileEntry, ...], FailFast()]
    tensors: Annotated[dict[str, TensorEntry], FailFast()]
    texts: dict[Literal["config.json", "generation_config.json"], JsonValue]
    adapters: AdaptersEntry | None = None
    stored_names: dict[str, JsonValue] = Field(default_factory=dict)
    model_files: Annotated[tuple[ModelFile, ...], FailFast()] = ()
    extra: dict[str, JsonValue]

    @property
    def has_weights_alone(self) -> bool:
        """Whether the save was imported: any optimizer can start from its weights."""
        return self.optimizer.name == NO_OPTIMIZER

    @property
    def names(self) -> dict[str, Assembly]:
        return {name: of_json(made) for name, made in self.stored_names.items()}

    @property
    def has_average(self) -> bool:
        """Whether a running mean of the weights was saved (``optimizer.ema``)."""
        return any("ema" in entry.values for entry in self.tensors.values())

    @property
    def num_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def place(self) -> SavePosition:
        return SavePosition(self.line, self.step)


def draft(**facts: Any) -> Manifest:
    """Return a manifest without files and tensors, which ``runtime.checkpoint.pieces.completed`` adds."""
    return Manifest(meshwright=__version__, written=now(), files=(), tensors={}, **facts)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def key_of(kind: str, name: str, start: Iterable[int]) -> str:
    """Return the name of a piece in its safetensors file."""
    return f"{kind}/{name}@{','.join(map(str, start))}"


def checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def write_manifest(path: Path, manifest: Manifest) -> str:
    """Write and sync a manifest, and return its checksum. Raises OSError, and PlanError if it could not be read."""
    inner = json.dumps(manifest.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()
    digest = checksum(inner)
    text = _HEAD + digest.encode() + _MIDDLE + inner + _TAIL
    if len(text) > MAX_BYTES:
        what = f"the manifest takes {len(text):,} bytes, more than {MAX_BYTES:,}"
        raise PlanError(what, where=str(path), fix="store less in extra")
    _checked(inner, path)
    write_new(path, text)
    return digest


def read_manifest(directory: Path) -> tuple[Manifest, str]:
    """Return the manifest of a save and its checksum. Raises PlanError, naming the file, unless it is valid."""
    path = directory / MANIFEST
    inner, digest = _framed(path)
    return _with_plain_names(_checked(inner, path)), digest


def _with_plain_names(manifest: Manifest) -> Manifest:
    """Return a manifest with names as in plans: some saves have those of torch.compile's wrappers."""
    names = [*manifest.tensors, *manifest.optimizer.rested]
    if all(plain_name(name) == name for name in names):
        return manifest
    tensors = {
        plain_name(name): entry.model_copy(update={"aliases": tuple(map(plain_name, entry.aliases))})
        for name, entry in manifest.tensors.items()
    }
    rested = {plain_name(name): updates for name, updates in manifest.optimizer.rested.items()}
    optimizer = manifest.optimizer.model_copy(update={"rested": rested})
    return manifest.model_copy(update={"tensors": tensors, "optimizer": optimizer})


def place_of(directory: Path) -> SavePosition | None:
    """Return line and step of a save without checking its tensors; None if its manifest is damaged."""
    try:
        inner, _ = _framed(directory / MANIFEST)
        _refuse_too_many(inner, directory / MANIFEST)
        head = _Head.model_validate_json(inner)
    except (PlanError, ValidationError):
        return None
    return SavePosition(head.line, head.step)


class _Head(BaseModel):
    """Line and step of a manifest."""

    step: Size
    line: Line = Line(id=NO_LINE)


def _framed(path: Path) -> tuple[bytes, str]:
    """Return the content of the frame and its checksum. Raises PlanError if they do not match."""
    text = read_small(path, MAX_BYTES)
    start = len(_HEAD) + _DIGITS
    digest, inner = text[len(_HEAD) : start].decode("latin-1"), text[start + len(_MIDDLE) : -len(_TAIL)]
    is_framed = text.startswith(_HEAD) and text[start:].startswith(_MIDDLE) and text.endswith(_TAIL)
    if not is_framed or digest != checksum(inner):
        raise _damaged(path, "its bytes changed after it was written")
    return inner, digest


def _checked(inner: bytes, path: Path) -> Manifest:
    manifest = _parsed(inner, path)
    if problem := _problem(manifest):
        raise _damaged(path, problem)
    return manifest


def _refuse_too_many(inner: bytes, path: Path) -> None:
    """Raise PlanError before parsing a text that would take far more memory than its size."""
    if too_many := [sign.decode() for sign, most in _MOST.items() if inner.count(sign) > most]:
        raise _damaged(path, f"too many entries in {too_many[0]}")


def _parsed(inner: bytes, path: Path) -> Manifest:
    _refuse_too_many(inner, path)
    try:
        content = json.loads(inner)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)[:200]) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _damaged(path, "it does not belong to a checkpoint")
    if content.get("version") not in _READ:
        raise PlanError(
            "it was written by another version of meshwright", where=str(path), fix="load it with that version"
        )
    # pydantic would report each absent name with a copy of all others
    if odd := content.keys() ^ Manifest.model_fields.keys() - (_LATER - content.keys()):
        raise _damaged(path, f"absent or unknown: {min(odd)[:80]!r}")
    del content
    try:
        return Manifest.model_validate_json(inner)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise _damaged(path, f"{place!r}: {first['msg'][:200]}") from None


def _problem(manifest: Manifest) -> str:
    """Return the first contradiction in the manifest, or "" if there is none."""
    names = [file.name for file in manifest.files]
    if len(set(names)) != len(names):
        return "a file is listed twice"
    sizes, corners = [0] * len(names), 0
    for name, entry in manifest.tensors.items():
        boxes, item_bytes = entry.boxes, sum(getattr(torch, dtype).itemsize for dtype in entry.values.values())
        for (file, *_), box in zip(entry.pieces, boxes, strict=True):
            ends = zip(box.start, box.stop, entry.shape, strict=False)
            fits = len(box.start) == len(box.stop) == len(entry.shape) and all(a < b <= n for a, b, n in ends)
            if not fits or file >= len(sizes):
                return f"a piece of {name[:200]!r} lies outside the tensor, or in no file"
            sizes[file] += box.num_elements * item_bytes
        corners += num_corners(entry.shape, boxes)
        if corners > _MAX_CORNERS:
            return f"more than {_MAX_CORNERS:,} corners of pieces"
        if not entry.values or not tiles(entry.shape, boxes):
            return f"the pieces of {name[:200]!r} do not contain each element exactly once"
    try:
        stored = manifest.names
    except ValueError as error:
        return str(error)
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    is_other = any(shapes.get(s.name) != s.shape for made in stored.values() for s in sources(made))
    if is_other and manifest.adapters is None:
        return "names of files are of other tensors"
    for file, size in zip(manifest.files, sizes, strict=True):
        if size > file.bytes:
            return f"{file.name} is smaller than its listed contents"
    return ""


def _damaged(path: Path, how: str) -> PlanError:
    return bad_save(path, f"is damaged: {how}")


def json_of(extra: Any) -> dict[str, JsonValue]:
    """Return ``extra`` as ``load`` will return it. Raises PlanError for values that JSON cannot hold."""
    try:
        text = json.dumps(dict(extra or {}), allow_nan=False)
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(
            f"extra cannot be stored as JSON: {error}", where="extra", fix="use numbers, strings, lists and dicts"
        ) from None
