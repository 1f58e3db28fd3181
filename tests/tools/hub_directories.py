"""Directories of the Hub as transformers saves them, and plans of these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from planner.capture.model.hub_format import hub_format
from planner.capture.model.reference import load_model
from planner.frozen_plan import Plan
from planner.spec.spec import Spec
from runtime.checkpoint.conversion import described
from runtime.checkpoint.hub_tensors import read_ranges
from runtime.checkpoint.pretrained_load import Found, find_in
from runtime.checkpoint.safetensors_files import SINGLE, SafetensorsFiles
from runtime.checkpoint.weight_files import WeightFiles
from runtime.engine.engine import Engine
from runtime.fuzz.forks import StoreHost
from runtime.verify.reference import OneProcess
from runtime.weights.shards import senders_of, shard
from tests.models.hub_families import FAMILIES
from tests.models.hugging_face import LENGTH, VOCABULARY, made
from tests.tools.captures import plan_again
from tests.tools.limits import HANG_SECONDS
from tests.tools.saved_memory import MostMade


def saved(family: str, directory: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A random model, saved by transformers itself in its original format. ``sizes``: others than the family's."""
    member = FAMILIES[family]
    model = made(replace(member, sizes=member.sizes | sizes)).to(dtype)
    for table in (buffer for buffer in model.buffers() if buffer.dim() > 1 and not buffer.is_floating_point()):
        table.random_(4)  # an expert for each token: of zeros, one expert would have all of them
    model.save_pretrained(directory)
    return model


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / SINGLE)


def found_in(directory: Path) -> Found:
    model = load_model(f"hf:{directory}")
    with SafetensorsFiles(directory) as files:
        return find_in(files, hub_format(model), described(model))


LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "tp 2": {"mesh": {"tp": 2}},
    "ep 2": {"mesh": {"dp": 2, "ep": 2}},
    "ep 2, tp 2": {"mesh": {"tp": 2, "dp": 2, "ep": 2}},
    "zero 3": {"mesh": {"dp": 2}, "optimizer": {"zero": 3}},
    "pp 2": {"mesh": {"pp": 2}},
}


def spec_of(layout: str) -> dict[str, Any]:
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    common = {"batch": {"global": 4, "micro": 2}, "inputs": {"input_ids": ids, "labels": ids}}
    # a large eps: where a gradient is tiny, Adam's first step would otherwise be the sign of a rounding error; no
    # clipping: each layout sums the norm in another order, and every gradient would be scaled by its rounding
    optimizer = {"lr": 0.01, "eps": 0.01, "clip_grad_norm": None, **LAYOUTS[layout].get("optimizer", {})}
    return {**common, **LAYOUTS[layout], "optimizer": optimizer}


def planned(directory: Path, layout: str) -> Plan:
    model: Any = load_model(f"hf:{directory}").eval()
    model.config._name_or_path = ""  # with its own path, each directory's would be captured again
    for module in model.modules():
        vars(module).pop("name_or_path", None)
    return plan_again(model, Spec.load(spec_of(layout)))


def assert_ranks_read_their_parts(decided: Plan, directory: Path) -> None:
    """Against transformers' own loading."""
    wanted = load_model(f"hf:{directory}", materialize=True).state_dict()
    with WeightFiles(directory) as files:
        found = find_in(files, decided.hub, decided.parameters)
        for row in decided.parameters:
            for part in senders_of(row, decided.mesh).values():
                value = torch.zeros(row.local_shape, dtype=wanted[row.name].dtype)
                read_ranges(value, found.parameters[row.name][0], part.ranges, files.read)
                assert torch.equal(value, shard(wanted[row.name], part)), (row.name, part)


STEPS = 3
PLANNED: list[Plan] = []  # of the process that ranks are forked from


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randint(3, VOCABULARY, (4, LENGTH), generator=generator) for n in ("input_ids", "labels")}


def trained_by_ranks(host: StoreHost, directory: Path, layout: str, target: str = "out") -> dict[str, Tensor]:
    """``directory``/in → ``directory``/copied → three steps → ``directory``/``target``: the ranks' full parameters."""
    PLANNED[:] = [planned(directory / "in", layout)]
    return host.run_ranks(PLANNED[0].mesh.world_size, _train, directory, target)[0]


def _train(directory: Path, target: str) -> dict[str, Tensor]:
    with Engine(PLANNED[0], timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(directory / "in")
        engine.save_pretrained(directory / "copied")
        for _ in range(STEPS):
            engine.train_step(batch())
        engine.save_pretrained(directory / target)
        return engine.gather_parameters()


def most_bytes_while_writing(host: StoreHost, directory: Path, layout: str) -> list[int]:
    """``directory``/in → ``directory``/out: of each rank, the bytes that it held at once beside its weights."""
    PLANNED[:] = [planned(directory / "in", layout)]
    return host.run_ranks(PLANNED[0].mesh.world_size, _write, directory)


def _write(directory: Path) -> int:
    with Engine(PLANNED[0], timeout_seconds=HANG_SECONDS) as engine:
        engine.load_pretrained(directory / "in")
        with MostMade() as made_there:
            engine.save_pretrained(directory / "out")
        return made_there.most_bytes


def trained_alone(directory: Path) -> dict[str, Tensor]:
    """The same in one process, by transformers' own loading and plain torch."""
    model: Any = load_model(f"hf:{directory / 'in'}", materialize=True)
    model.set_experts_implementation("eager")  # grouped products have no float64
    one = OneProcess(model, Spec.load(spec_of("one")))
    for _ in range(STEPS):
        one.train_step(batch())
    return model.state_dict()
