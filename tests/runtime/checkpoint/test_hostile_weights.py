"""A directory of weights may be anyone's: nothing in it is waited for, led astray by, or given memory on its word."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from passes.errors import PlanError
from runtime.checkpoint.pretrained_load import read_whole
from runtime.checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsFiles
from tests.tools.mutations import at_most, mutants, survivors


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
