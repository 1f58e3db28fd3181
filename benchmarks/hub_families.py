"""Families of which files hold other tensors than the model: `python -m benchmarks.hub_families [FAMILY …]`.

    stored, model    tensors of the files as transformers writes them, and of the model
    converted        tensors of the model that are made of others, and how many stored ones they are made of
    whole            bytes that an op without a rule for parts reads whole
    ours             seconds to read every tensor by parts of files that are in memory; transformers: its own loading

Each family is small, so seconds are those of names and calls. With `--wide` a Mixtral of 1 GB is read too, for bytes a
second. Quote ratios of one sitting only.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from planner.capture.model.assembly import Source, read_whole, sources
from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import load_model
from planner.sharding.boxes import Box
from runtime.checkpoint.conversion import described
from runtime.checkpoint.hub_tensors import read_into
from runtime.checkpoint.pretrained_load import find_in
from runtime.checkpoint.weight_files import WeightFiles
from tests.models.hub_families import FAMILIES
from tests.models.hugging_face import Member, made

WIDE = {"hidden_size": 1024, "intermediate_size": 2560, "num_local_experts": 8, "num_hidden_layers": 4}
HEAD = "family", "stored", "model", "converted", "whole", "MB", "ours, s", "transformers, s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=[*FAMILIES])
    parser.add_argument("--wide", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    members = {name: FAMILIES[name] for name in asked.families}
    if asked.wide:
        members["mixtral, wide"] = replace(FAMILIES["mixtral"], sizes=FAMILIES["mixtral"].sizes | WIDE)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name, member in members.items():
        with tempfile.TemporaryDirectory() as directory:
            print(f"| {name} | {' | '.join(map(str, row(member, Path(directory))))} |", flush=True)
    print(f"\ntorch {torch.__version__}, {sys.platform}", file=sys.stderr)


def row(member: Member, directory: Path) -> tuple[Any, ...]:
    written: Any = made(member)
    written.save_pretrained(directory)
    model, transformers_seconds = timed(lambda: load_model(f"hf:{directory}", materialize=True))
    wanted = model.state_dict()
    (stored, conversions), seconds = timed(lambda: read_all(load_model(f"hf:{directory}"), directory, wanted))
    whole = sum(read_whole(conversions).values()) * 4
    others = [each for each in conversions if not isinstance(each, Source)]
    converted = f"{len(others)} of {sum(len(list(sources(each))) for each in others)}"
    size = sum(value.numel() * value.element_size() for value in wanted.values()) / 1e6
    return stored, len(wanted), converted, whole, f"{size:.2f}", f"{seconds:.2f}", f"{transformers_seconds:.2f}"


def read_all(model: nn.Module, directory: Path, wanted: dict[str, torch.Tensor]) -> tuple[int, list[Any]]:
    """How many tensors are stored, and how the model's are made of them. Raises ValueError for another value."""
    with WeightFiles(directory) as files:
        found = find_in(files, hub_format(model), described(model))
        tensors = {name: copies[0] for name, copies in found.parameters.items()} | dict(found.buffers)
        for name, assembly in tensors.items():
            value = torch.empty(assembly.shape, dtype=wanted[name].dtype)
            read_into(value, assembly, Box.whole(assembly.shape), files.read)
            if not value.equal(wanted[name]):
                raise ValueError(name)
        return len(files.tensors), [*tensors.values()]


def timed(act: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return act(), time.perf_counter() - start


if __name__ == "__main__":
    main()
