"""The time of planning, in all and by phase, and its memory: `python benchmarks/planning.py`.

Each job runs in a process of its own, on meta weights, without a process group. A phase is a function that the recipe
of planner/api.py calls; building the model and importing torch and transformers are listed separately.
"""

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TIMEOUT_SECONDS = 300

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 12}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "intermediate_size": 53248,
    "num_attention_heads": 128, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}  # fmt: skip

DEEPSEEK = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61}  # 671B


def inputs(length: int, high: int) -> dict[str, Any]:
    return {"input_ids": {"shape": [length], "dtype": "int64", "high": high}, "labels": {"like": "input_ids"}}


# name -> config, mesh, batch, inputs, and the targets: seconds and MiB
JOBS: dict[str, tuple[dict, dict, dict, dict, float, float]] = {
    "gpt2, 12 layers, tp2 pp2 dp2": (
        GPT2, {"tp": 2, "pp": 2, "dp": 2}, {"global": 16, "micro": 2}, inputs(1024, 50257), 3, 1500,
    ),
    "llama 405B shape, tp8 pp16 dp128": (
        {**LLAMA, "num_hidden_layers": 126}, {"tp": 8, "pp": 16, "dp": 128}, {"global": 2048, "micro": 1},
        inputs(4096, 128256), 25, 1500,
    ),
    "the same with 14 layers, pp2": (
        {**LLAMA, "num_hidden_layers": 14}, {"tp": 8, "pp": 2, "dp": 128}, {"global": 2048, "micro": 1},
        inputs(4096, 128256), 25, 1500,
    ),
    "deepseek v3 shape, tp8 pp16 dp8 ep64 etp1": (
        DEEPSEEK, {"tp": 8, "pp": 16, "dp": 8, "ep": 64, "etp": 1}, {"global": 256, "micro": 1},
        inputs(4096, 129280), 60, 2000,
    ),
    "deepseek v3 shape, tp8 pp16 dp8, experts cut as all else": (
        DEEPSEEK, {"tp": 8, "pp": 16, "dp": 8}, {"global": 256, "micro": 1}, inputs(4096, 129280), 60, 2000,
    ),
}  # fmt: skip


GRAPHS = "regions for CUDA graphs of the first job, attn + mlp"
ROUNDS, MOST_ADDED = 7, 0.2
LENGTHS = "three lengths of a sequence beside the greatest one"
NUM_EXPERTS = 128
EXPERTS = f"two loops over {NUM_EXPERTS} experts, dp 2, ep 2"
LENGTHS_PLANNED, MOST_TIMES = [256, 512, 1024], 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=[*JOBS, *OTHERS], help="run this job here and print JSON")
    arguments = parser.parse_args()
    if arguments.job:
        other = OTHERS.get(arguments.job)
        print(json.dumps(measure(arguments.job) if other is None else other[0]()))
        return
    for name in JOBS:
        print(report(name, run(name)), flush=True)
    for name, (_, shown) in OTHERS.items():
        print(shown(run(name)), flush=True)


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--job", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def report(name: str, row: dict[str, Any]) -> str:
    *_, seconds, mib = JOBS[name]
    lines = [
        f"## {name}",
        "",
        f"plan {row['plan_seconds']:.2f} s, CPU {row['plan_cpu_seconds']:.2f} s (reach {seconds} s); "
        f"peak RSS {row['peak_rss_mib']:.0f} MiB (reach {mib}); "
        f"before it: imports {row['import_seconds']:.2f} s, model on meta {row['model_seconds']:.2f} s, "
        f"{row['rss_before_mib']:.0f} MiB",
        "",
        "| phase | CPU seconds |",
        "|---|---|",
    ]
    phases = sorted(row["phases"].items(), key=lambda item: -item[1])
    lines += [f"| {phase} | {spent:.2f} |" for phase, spent in phases if spent >= 0.01]
    return "\n".join([*lines, ""])


def measure(name: str) -> dict[str, Any]:
    start = time.perf_counter()
    import torch
    import transformers.models.auto.modeling_auto  # noqa: F401 - so that its import is not counted as planning

    from planner import api
    from planner.capture.model.reference import load_model

    imported = time.perf_counter()
    torch.set_num_threads(1)
    config, mesh, batch, given, *_ = JOBS[name]
    model = model_of(config, load_model)
    built, before = time.perf_counter(), peak_mib()
    phases, cpu_start = time_phases(api), time.process_time()
    api.plan(model, {"mesh": mesh, "batch": batch, "inputs": given})
    return {
        "import_seconds": imported - start,
        "model_seconds": built - imported,
        "plan_seconds": time.perf_counter() - built,
        "plan_cpu_seconds": time.process_time() - cpu_start,
        "rss_before_mib": before,
        "peak_rss_mib": peak_mib(),
        "phases": phases,
    }


def model_of(config: dict[str, Any], load_model: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        return load_model(f"hf:{directory}")


def measure_graphs() -> dict[str, Any]:
    """The same plan with regions and without, in turn: the least seconds of each, and of the two steps alone."""
    import torch

    from planner import api
    from planner.capture.model.reference import load_model

    torch.set_num_threads(1)
    config, mesh, batch, given, *_ = next(iter(JOBS.values()))
    spec = {"mesh": mesh, "batch": batch, "inputs": given}
    graphs = {"cuda_graphs": {"impl": "emulate", "scope": ["attn", "mlp"]}}
    phases, steps = time_phases(api), list[float]()
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(ROUNDS):
        for kind, asked in (("without", {}), ("with", graphs)):
            model = model_of(config, load_model)
            phases.clear()
            gc.collect()
            gc.disable()  # it would fall into one of the two
            start = time.process_time()
            api.plan(model, {**spec, **asked})
            seconds[kind].append(time.process_time() - start)
            gc.enable()
        steps.append(phases["decide_regions"] + phases["decide_slots"])
    return {**{kind: min(found) for kind, found in seconds.items()}, "steps": min(steps)}


def report_graphs(row: dict[str, float]) -> str:
    added = row["with"] / row["without"] - 1
    return (
        f"## {GRAPHS}\n\nCPU {row['without']:.3f} s without, {row['with']:.3f} s with them: {added:+.1%} "
        f"(reach {MOST_ADDED:+.0%}); decide_regions and decide_slots alone {row['steps'] * 1e3:.1f} ms; "
        f"least of {ROUNDS}\n"
    )


def measure_lengths() -> dict[str, Any]:
    """Plans of one length and of three, in turn: the least CPU seconds of each, for GPT-2 and for examples/gpt.py."""
    import torch

    from examples.gpt import GPT
    from planner import api
    from planner.capture.model.reference import load_model

    torch.set_num_threads(1)
    sizes = {"vocabulary": 50257, "width": 768, "num_heads": 12, "num_layers": 12, "length": LENGTHS_PLANNED[-1]}
    builds: dict[str, tuple[str, str, Callable[[], Any]]] = {
        "GPT-2 124M": ("input_ids", "labels", lambda: model_of(GPT2, load_model)),
        "GPT of examples/gpt.py, 12 layers": ("input_ids", "targets", lambda: GPT(**sizes)),
    }
    found: dict[str, Any] = {}
    for name, (ids, labels, build) in builds.items():
        seconds: dict[str, list[float]] = {"one": [], "three": []}
        for _ in range(ROUNDS):
            for kind, shape in (("one", LENGTHS_PLANNED[-1:]), ("three", [LENGTHS_PLANNED])):
                given = {ids: {"shape": shape, "dtype": "int64", "high": 50257}, labels: {"like": ids}}
                spec = {"mesh": {"tp": 2, "pp": 2, "dp": 2}, "batch": {"global": 16, "micro": 2}, "inputs": given}
                with torch.device("meta"):
                    model = build()
                gc.collect()
                start = time.process_time()
                api.plan(model, spec)
                seconds[kind].append(time.process_time() - start)
        found[name] = {kind: min(spent) for kind, spent in seconds.items()}
    return found


def report_lengths(found: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{name}: CPU {row['one']:.2f} s one, {row['three']:.2f} s three: {row['three'] / row['one']:.2f} times "
        f"(reach {MOST_TIMES:.0f})"
        for name, row in found.items()
    ]
    return "\n".join([f"## {LENGTHS}: {LENGTHS_PLANNED}", "", *lines, f"least of {ROUNDS}", ""])


def measure_experts() -> dict[str, Any]:
    """Two layers, each a loop over a ModuleList of experts 16 wide: the least CPU seconds of a plan beside capture."""
    from functools import partial

    import torch

    from planner import api
    from tests.models.experts import LENGTH, VOCABULARY, Blocks, Layer, masks

    torch.set_num_threads(1)
    model = Blocks(partial(Layer, masks, hidden=16, width=16, num_experts=NUM_EXPERTS), hidden=16)
    batch = {"global": 4, "micro": 2}
    spec = {"mesh": {"dp": 2, "ep": 2}, "batch": batch, "inputs": inputs(LENGTH, VOCABULARY)}
    start, found = time.process_time(), list[float]()
    captured = api.capture(model, spec)
    seconds = time.process_time() - start
    for _ in range(ROUNDS):
        start = time.process_time()
        api.plan(captured, spec)
        found.append(time.process_time() - start)
    return {"capture": seconds, "plan": min(found)}


def report_experts(row: dict[str, float]) -> str:
    seconds = f"CPU {row['capture']:.2f} s capture, {row['plan']:.3f} s a plan of it"
    return f"## {EXPERTS}\n\n{seconds}, least of {ROUNDS}\n"


# name -> its measurement, and its lines
OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], str]]] = {
    GRAPHS: (measure_graphs, report_graphs),
    LENGTHS: (measure_lengths, report_lengths),
    EXPERTS: (measure_experts, report_experts),
}


def time_phases(api: Any) -> dict[str, float]:
    """Replace the planner's functions that ``api`` calls by timed ones; the outermost call counts."""
    spent: dict[str, float] = {}
    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if running:
                return function(*args, **kwargs)
            running.append(name)
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                running.pop()
                spent[name] = spent.get(name, 0.0) + time.process_time() - start

        return call

    for name, value in list(vars(api).items()):
        module = getattr(value, "__module__", "") or ""
        is_function = callable(value) and not isinstance(value, type)
        if is_function and module.startswith("planner") and name != "plan":
            setattr(api, name, timed(name, value))
    return spent


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
