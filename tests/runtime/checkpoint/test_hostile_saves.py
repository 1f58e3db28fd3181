"""Saves that somebody has made by hand: whatever they say, one error; no traceback, no wait, no memory."""

import copy
import json
import os
import random
import resource
import shutil
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from passes.errors import PlanError
from runtime.checkpoint.manifest import MANIFEST, MAX_BYTES
from runtime.checkpoint.pretrained_load import read_whole
from runtime.checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsFiles
from runtime.checkpoint.saves import verify
from runtime.fuzz.forks import in_fork
from tests.tools.checkpoints import Own, own_engine
from tests.tools.mutations import at_most, mutants, survivors
from tests.tools.small_saves import newest_intact, save

NUM_MUTANTS, MEMORY, SECONDS = 500, 1 << 30, 10.0  # of the processor: other programs may run beside it
DEEP = "[" * 100_000 + "]" * 100_000


def frame(inner: bytes) -> bytes:
    return b'{"checksum": "' + xxhash.xxh3_128_hexdigest(inner).encode() + b'", "manifest": ' + inner + b"}\n"


def inner_of(path: Path) -> bytes:
    return path.read_bytes()[len(b'{"checksum": "') + 32 + len(b'", "manifest": ') : -2]


VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**47, 2**48 + 1, 2**63, 2**64, 10**400, 0.5, 1e308, "", "x", "x" * 5000,
    "../../etc/passwd", "/etc/passwd", "rank-00000.safetensors", "rank-00001.safetensors", "\x00", "ü\ud800", [], {},
    [[]], [0], [2**40] * 8, [1] * 20, {"": {}}, {"parameter": "float32"}, {"buffer": "int64"},
    {"parameter": "complex64"}, [[0, [0], [1]]] * 1000, [[9, [0], [1]]], [[0, [0, 0], [2**40, 2**40]]],
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to everything inside."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(manifest: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One to three changes: another value, a name that is gone, doubled, or new."""
    made: Any = copy.deepcopy(manifest)
    for _ in range(draw.randint(1, 3)):
        ways = [path for path in places(made) if path]
        # Names stand near the top and are few: they are drawn as often as the many numbers below.
        depth = draw.choice(sorted({len(path) for path in ways}))
        *way, last = draw.choice([path for path in ways if len(path) == depth])
        owner = made
        for key in way:
            owner = owner[key]
        kind = draw.choice(["value", "value", "gone", "new"])
        if kind == "gone":
            del owner[last]
        elif kind == "value":
            owner[last] = copy.deepcopy(draw.choice(VALUES))
        elif isinstance(owner, dict):
            owner[draw.choice(["new", "", "x" * 5000])] = copy.deepcopy(draw.choice([owner[last], *VALUES]))
        else:
            owner.append(copy.deepcopy(draw.choice([owner[last], *VALUES])))
    return made


def mutated_header(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another length of its header, another header, or bytes changed in it."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = draw.choice(["length", "bytes", "offsets", "deep", "huge shape", "cut"])
    if kind == "length":
        return struct.pack("<Q", draw.choice([0, 1, length - 1, length + 8, 10**8, 2**40, 2**64 - 1])) + content[8:]
    if kind == "bytes":
        made = bytearray(header)
        for _ in range(draw.randint(1, 4)):
            made[draw.randrange(len(made))] = draw.randrange(256)
        return struct.pack("<Q", length) + bytes(made) + data
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    described = json.loads(header)
    name = draw.choice([key for key in described if key != "__metadata__"])
    if kind == "offsets":
        described[name]["data_offsets"] = [draw.choice([0, 2**40, -1]), draw.choice([0, 2**62, 4])]
    elif kind == "huge shape":
        described[name]["shape"] = draw.choice([[2**40, 2**40], [2**62], [0] * 50, [10**30]])
    text = DEEP.encode() if kind == "deep" else json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


def make_mutant(pristine: Path, run: Path, draw: random.Random) -> str:
    """A mutant of the save in ``run``, its checksums right again; what was changed."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(pristine, run)
    manifest = json.loads(inner_of(run / MANIFEST))
    if draw.random() < 0.7:
        manifest, kind = mutated(manifest, draw), "manifest"
    else:
        path, kind = run / manifest["files"][0]["name"], "header"
        content = mutated_header(path.read_bytes(), draw)
        path.write_bytes(content)
        manifest["files"][0] |= {"bytes": len(content), "checksum": xxhash.xxh3_128_hexdigest(content)}
    (run / MANIFEST).write_bytes(frame(json.dumps(manifest).encode()))
    return kind


def load_mutants(directory: Path, num: int) -> Counter[str]:
    """In a fork with little memory: how mutants end, each tried by the command's way and by an engine."""
    found: Counter[str] = Counter()
    with own_engine(Own()) as engine:
        engine.save(directory / "pristine")
        (pristine,) = (directory / "pristine").glob("step-*")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        run = directory / "run" / pristine.name
        for seed in range(num):
            kind = make_mutant(pristine, run, random.Random(seed))
            began = time.process_time()
            for act in (verify, engine.load):
                found[f"{kind} {end_of(act, run)}"] += 1
            assert time.process_time() - began < SECONDS, f"mutant {seed}"
    return found


def end_of(act: Callable[[Path], Any], run: Path) -> str:
    told = ""
    try:
        act(run)
    except PlanError as error:
        told = str(error)
    assert len(told) < 3000, told[:3000]
    return "refused" if told else "taken"


@pytest.mark.thorough
@pytest.mark.slow
def test_five_hundred_mutants_end_in_one_error_each(tmp_path: Path) -> None:
    found = in_fork(load_mutants, tmp_path, NUM_MUTANTS)
    assert sum(found.values()) == 2 * NUM_MUTANTS
    assert found["manifest refused"] > found["manifest taken"] > 0  # such as another date
    assert found["header refused"] > 200


@pytest.mark.parametrize(
    ("where", "name"),
    [("texts", "../config.json"), ("texts", "/tmp/config.json"), ("files", "../rank-00000.safetensors")],
)
def test_no_name_leaves_the_directory(tmp_path: Path, where: str, name: str) -> None:
    save(tmp_path, 1, 1.0)
    path = tmp_path / "step-00000001" / MANIFEST
    manifest = json.loads(inner_of(path))
    if where == "texts":
        manifest["texts"] = {name: {}}
    else:
        manifest["files"][0]["name"] = name
        shutil.copy(path.parent / "rank-00000.safetensors", tmp_path)
    path.write_bytes(frame(json.dumps(manifest).encode()))
    with pytest.raises(PlanError, match=f"manifest.json is damaged: '{where}."):
        verify(path.parent)


def large(path: Path, content: bytes) -> None:
    path.write_bytes(frame(b'{"format":"meshwright checkpoint","extra":' + content + b"}"))


WAYS: dict[str, Callable[[Path], None]] = {
    "deep": lambda path: large(path, DEEP.encode()),
    "many lists": lambda path: large(path, b"[" + b"[]," * (MAX_BYTES // 3 - 100) + b"[]]"),
    "many strings": lambda path: large(path, b"[" + b'"ab",' * (MAX_BYTES // 5 - 100) + b'""]'),
    "many names": lambda path: large(path, b"{" + b",".join(b'"%d":1' % n for n in range(1_500_000)) + b"}"),
    "too large": lambda path: large(path, b" " * (MAX_BYTES + 1)),
    "sparse": lambda path: path.open("wb").truncate(1 << 40),
    "many digits": lambda path: large(path, b"1" * 1_000_000),
    "no text": lambda path: path.write_bytes(frame(b"\xff\xfe\x00")),
    "many pieces": lambda path: many_pieces(path),
    "many errors": lambda path: many_errors(path),
}  # fmt: skip


def many_errors(path: Path) -> None:
    manifest = json.loads(inner_of(path))
    manifest["tensors"] = {str(n): 1 for n in range(200_000)}
    path.write_bytes(frame(json.dumps(manifest, separators=(",", ":")).encode()))


def many_pieces(path: Path) -> None:
    """A tensor of five dims in very many pieces, none of which is there."""
    manifest = json.loads(inner_of(path))
    pieces = [[0, [0] * 5, [1] * 5]] * 150_000
    manifest["tensors"] = {
        "up": {"shape": [9] * 5, "values": {"parameter": "float32"}, "aliases": [], "pieces": pieces}
    }
    path.write_bytes(frame(json.dumps(manifest, separators=(",", ":")).encode()))


def refuse(directory: Path) -> tuple[str, float, int]:
    """In a fork: the error, the seconds of the processor that it took, and the growth of memory at its peak."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    save, errors = newest_intact(directory)
    assert save is None
    seconds = time.process_time() - began
    return str(errors[0]), seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_manifest_that_would_take_memory_or_time_is_refused(tmp_path: Path, way: str) -> None:
    save(tmp_path, 1, 1.0)
    in_fork(WAYS[way], tmp_path / "step-00000001" / MANIFEST)
    told, seconds, memory = in_fork(refuse, tmp_path)
    assert MANIFEST in told
    assert len(told) < 1000
    assert seconds < SECONDS
    assert memory < MEMORY


# ---- A directory of weights may be anyone's: nothing in it is waited for, led astray by, or given memory on its word


def error(directory: Path) -> str:
    with pytest.raises(PlanError) as caught, at_most(10), SafetensorsFiles(directory):
        pass
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def sharded(directory: Path, places: dict[str, str] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    for name in ("a", "b"):
        save_file({name: torch.arange(3.0)}, directory / f"{name}.safetensors")
    places = places or {"a": "a.safetensors", "b": "b.safetensors"}
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))
    return directory


@pytest.mark.parametrize("name", [SINGLE, INDEX, "other.safetensors"])
def test_a_pipe_or_a_device_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "a pipe, not a regular file" in error(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    assert "a device, not a regular file" in error(tmp_path)


def test_a_directory_that_no_file_system_has_is_none():
    assert "no directory nnn" in error(Path("n" * 5000))
    assert "no directory" in error(Path("a\0b"))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "x/y", "n" * 5000, 3, None])
def test_an_index_names_files_of_its_directory_alone(tmp_path, file):
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    words = error(sharded(tmp_path / "model", {"a": file}))
    assert "which is no file name" in words


def test_links_of_a_cache_are_followed_to_regular_files(tmp_path):
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.arange(4.0)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshots" / "main").mkdir(parents=True)
    (tmp_path / "snapshots" / "main" / SINGLE).symlink_to("../../blobs/0123")
    with SafetensorsFiles(tmp_path / "snapshots" / "main") as files:
        target = torch.zeros(4)
        read_whole(files, files.source("a"), target)
    assert target.tolist() == [0, 1, 2, 3]


def test_a_header_of_an_absurd_size_is_refused_before_memory_is_taken(tmp_path):
    path = tmp_path / SINGLE
    for told, words in [(2**63, "truncated"), (100, "truncated"), (1 << 30, "header of 1,073,741,824 bytes")]:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", told) + b"{}")
            file.truncate((2 << 30) if told == 1 << 30 else 50)
        assert words in error(tmp_path)
    path.write_bytes(b"1234")
    assert "truncated" in error(tmp_path)


def test_an_index_that_is_no_index_is_one_error(tmp_path):
    sharded(tmp_path)
    for text in (
        "[" * 100_000,
        '{"weight_map": ' * 900,
        '{"weight_map": {"a": "a.safetensors", "a": "b"}}',
        "9" * 9000,
    ):
        (tmp_path / INDEX).write_text(text)
        assert "the index is damaged or truncated" in error(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x" * 5000: "a.safetensors"}}))
    assert "which does not hold it" in error(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    sharded(tmp_path)
    save_file({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path / "b.safetensors")
    assert "a is stored twice, in a.safetensors and b.safetensors" in error(tmp_path)


def test_mutated_headers_and_indices_open_or_are_one_error(tmp_path):
    sharded(tmp_path)
    for path in (tmp_path / INDEX, tmp_path / "a.safetensors"):
        whole = path.read_bytes()
        text = whole.decode("latin-1")

        def attempt(mutant: str, path: Path = path) -> int:
            path.write_bytes(mutant.encode("latin-1", "replace"))
            with SafetensorsFiles(tmp_path) as files:
                return len(files.tensors)

        good, bad = survivors(list(mutants(text, 150, 1, str, str)), attempt)
        assert not bad, bad[:3]
        assert len(good) < 150
        path.write_bytes(whole)
