"""The cost of saving: `python benchmarks/checkpoints.py [--rounds N] [--directory DIR]`, GPT-2 124M on tp 2 · dp 2.

    bytes      all files of a save, over parameters and both moments once (12 bytes a parameter in float32)
    save       a synchronous save, over every rank writing the same tensors with safetensors' save_file and an fsync
    async      the step after save(wait=False), over a usual step; and the copy to host memory that the step waits for
    load       reading it back, checksums and all

Save and plain write take turns, so that a busy machine slows both alike, each to a new place, since blocks that a disk
has given back are faster than new ones. Figures are medians: seconds, and in brackets those of the processor on one
rank, which are steadier on a machine that does other things.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the repository's root has to be on the path first
from safetensors.torch import save_file  # noqa: E402

from planner import plan  # noqa: E402
from planner.capture.model.reference import load_model  # noqa: E402
from runtime import Engine  # noqa: E402
from runtime.distributed.launch import launch  # noqa: E402

CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_positions": 1024}
MESH, LENGTH, SEQUENCES, VOCABULARY = {"tp": 2, "dp": 2}, 1024, 4, 50257
TIMEOUT_SECONDS = 1500.0
PAIRS = 3  # of writes for each step that is timed
REACH = {"bytes": 1.01, "save": 1.2, "async": 1.15}
Figures = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where to write; a temporary directory if not given")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        figures = launch(measure, 4, directory, arguments.rounds, timeout_seconds=TIMEOUT_SECONDS)[0]
    print(table(figures))
    busy = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(
        f"\n{arguments.rounds} rounds; torch {version('torch')}, safetensors {version('safetensors')}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores ({platform.machine()}), load average at the end {busy}"
    )


def measure(directory: str, rounds: int) -> Figures:
    """On every rank; rank 0's clock, from a barrier to a barrier."""
    torch.set_num_threads(1)
    ids = {"shape": [LENGTH], "dtype": "int64", "high": VOCABULARY}
    spec = {
        "mesh": MESH,
        "batch": {"global": SEQUENCES, "micro": SEQUENCES // MESH["dp"]},
        "inputs": {"input_ids": ids, "labels": {"like": "input_ids"}},
    }
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    here, figures = Path(directory), Figures()
    with Engine(plan(load_model(f"hf:{here / 'config.json'}").eval(), spec)) as engine:

        def timed(name: str, act: Callable[[], Any]) -> None:
            engine.groups.barrier()
            began, processor = time.perf_counter(), time.process_time()
            act()
            engine.groups.barrier()
            figures.setdefault(name, []).append(time.perf_counter() - began)
            figures.setdefault(f"{name}, processor", []).append(time.process_time() - processor)

        def step() -> None:
            assert engine.train_step(batch).loss > 0

        step()
        for number in range(PAIRS * rounds):
            acts = [
                ("plain write", lambda place=here / f"plain-{number}": write_plainly(engine, place)),
                ("save", lambda place=here / f"run-{number}": engine.save(place)),
            ]
            for name, act in acts if number % 2 else acts[::-1]:
                timed(name, act)
        for _ in range(rounds):
            timed("load", lambda: engine.load(here / "run-0"))
            timed("usual step", step)
            timed("copy", lambda: engine.save(here / "background", wait=False))
            timed("step beside a save", step)
            engine.wait_saves()
        if engine.groups.rank == 0:
            figures["parameters"] = [sum(row.num_elements for row in engine.plan.parameters)]
            figures["bytes"] = [sum(path.stat().st_size for path in (here / "run-0").rglob("*") if path.is_file())]
        engine.groups.barrier()
    return figures


def write_plainly(engine: Engine, directory: Path) -> None:
    """The tensors that this rank would write, by the library alone; on the disk when it returns, as ours are."""
    directory.mkdir(exist_ok=True)
    pieces = engine.saves.training_state().written()
    tensors = {str(number): piece.values.contiguous() for number, piece in enumerate(pieces)}
    path = directory / f"{engine.groups.rank}.safetensors"
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def table(figures: Figures) -> str:
    of = {name: statistics.median(values) for name, values in figures.items()}

    def said(name: str) -> str:
        return f"{of[name]:.2f} s ({of[f'{name}, processor']:.2f})"

    rows = [
        ("bytes", f"{of['bytes']:,.0f}", of["bytes"] / (12 * of["parameters"])),
        ("save", f"{said('save')}, plain {said('plain write')}", of["save"] / of["plain write"]),
        (
            "async",
            f"{said('step beside a save')}, usual {said('usual step')}, copy {said('copy')}",
            of["step beside a save"] / of["usual step"],
        ),
    ]
    lines = ["| what | measured | ratio | reach |", "|---|---|---|---|"]
    lines += [f"| {name} | {words} | {ratio:.3f} | at most {REACH[name]} |" for name, words, ratio in rows]
    return "\n".join([*lines, f"| load | {said('load')} | | |", "", json.dumps(figures)])


if __name__ == "__main__":
    main()
