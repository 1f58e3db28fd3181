"""While it loads, a rank holds its share of the weights and at most one stored tensor: an expert, not the stack."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from planner.capture.model.assembly import sources
from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import load_model
from runtime.checkpoint.conversion import described
from runtime.checkpoint.hub_tensors import Entry, read_ranges
from runtime.checkpoint.pretrained_load import find_in
from runtime.checkpoint.pretrained_save import header_of
from runtime.checkpoint.safetensors_files import SINGLE
from runtime.checkpoint.weight_files import WeightFiles

pytest.importorskip("transformers")

import transformers

from tests.models.hub_families import FAMILIES

SIZES = {
    "hidden_size": 512, "moe_intermediate_size": 1024, "n_routed_experts": 8, "num_hidden_layers": 3,
    "first_k_dense_replace": 0, "intermediate_size": 64,
}  # fmt: skip
MIB = 1 << 20
SLACK = 12 * MIB  # of Python and of the allocator; a stack of experts takes 32


def held() -> int:
    """Bytes of this process that are of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most bytes that were held inside, beyond those of before."""
    found, before, ended = [0], held(), threading.Event()

    def watch() -> None:
        while not ended.is_set():
            time.sleep(0.001)
            found[0] = max(found[0], held() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


@pytest.mark.thorough
def test_half_of_the_experts_are_read_in_their_size_and_one_tensor(tmp_path):
    member = FAMILIES["deepseek_v3"]
    config = getattr(transformers, member.config)(**member.sizes | SIZES, architectures=[member.model])
    config.save_pretrained(tmp_path)
    model = load_model(f"hf:{tmp_path}")
    hub, own = hub_format(model), model.state_dict()
    made = {source.name for assembly in hub.stored_names.values() for source in sources(assembly)}
    shapes = {name: assembly.shape for name, assembly in hub.stored_names.items()}
    shapes |= {name: tuple(tensor.shape) for name, tensor in own.items() if name not in made}
    entries = [Entry(name, shape, torch.float32) for name, shape in shapes.items()]
    with (tmp_path / SINGLE).open("wb") as file:  # without tensors in memory, which would be taken again unseen
        file.write(header_of(entries))
        file.truncate(file.tell() + sum(entry.num_bytes for entry in entries))
    largest = max(entry.num_bytes for entry in entries)
    with WeightFiles(tmp_path) as files:
        found = find_in(files, hub, described(model))
        with peak() as most:
            values = []
            for name, (assembly, *_) in found.parameters.items():
                size, *rest = assembly.shape
                half = size // 2 if ".experts." in name else size
                values.append(torch.empty(half, *rest))
                read_ranges(values[-1], assembly, {0: ((0, half),)}, files.read)
    share = sum(value.numel() * value.element_size() for value in values)
    assert share > 3 * 4 * 6 * MIB  # of three layers, half of the experts
    assert 0.8 * share < most[0] < share + largest + SLACK
