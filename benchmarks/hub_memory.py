"""What a rank holds beside its weights while it loads a directory of the Hub and writes one: MiB, seconds, CPU seconds.

    python -m benchmarks.hub_memory [--layers 7]

A DeepSeek-V3 of 64 experts (1.25 GB of float32 in 7 layers), saved by transformers with a tensor for each expert, on
two ranks. Anonymous memory is read every 3 ms; pages of the files, which the kernel may drop, do not count.
"""

import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any, Self

import torch

from planner import plan
from planner.capture.model.reference import load_model
from planner.frozen_plan import Plan
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine

MIB = 1 << 20
IDS = {"shape": [16], "dtype": "int64", "high": 2048}
MESHES = ({"dp": 2, "ep": 2}, {"tp": 2})


def anonymous() -> int:
    """Bytes of this process that no file holds."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """Owns ``added``: the most that came since it was opened."""

    def __enter__(self) -> Self:
        self.added, self._is_open, self._before = 0, True, anonymous()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._thread.join()

    def _watch(self) -> None:
        while self._is_open:
            self.added = max(self.added, anonymous() - self._before)
            time.sleep(0.003)


def of_rank(folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with Engine(Plan.load(f"{folder}/plan.pt"), timeout_seconds=300) as engine:
        for name, call in {"loading": engine.load_pretrained, "writing": engine.save_pretrained}.items():
            begin, cpu = time.perf_counter(), time.process_time()
            with Peak() as peak:
                call(f"{folder}/{'in' if name == 'loading' else 'out'}")
            found |= {f"{name}, MiB": peak.added / MIB, f"{name}, s": time.perf_counter() - begin}
            found[f"{name}, CPU s"] = time.process_time() - cpu
    return found


def save_model(directory: Path, num_layers: int) -> float:
    """Its largest tensor in MiB."""
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 512,
    }
    sizes |= {
        "num_hidden_layers": num_layers,
        "n_routed_experts": 64,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 32,
    }
    sizes |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "max_position_embeddings": 64, "first_k_dense_replace": 1}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes))
    model.save_pretrained(directory, max_shard_size="300MB")
    return max(p.nbytes for p in model.parameters()) / MIB


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=7)
    num_layers = parser.parse_args().layers
    with tempfile.TemporaryDirectory() as folder:
        largest = save_model(Path(folder) / "in", num_layers)
        size = sum(path.stat().st_size for path in (Path(folder) / "in").glob("*.safetensors")) / 1e9
        print(f"{size:.2f} GB; the largest tensor of the model: {largest:.1f} MiB")
        for mesh in MESHES:
            spec = {"mesh": mesh, "batch": {"global": 4, "micro": 2}, "inputs": {"input_ids": IDS, "labels": IDS}}
            made = plan(load_model(f"hf:{folder}/in").eval(), spec)
            made.save(f"{folder}/plan.pt")
            for rank, row in enumerate(launch(of_rank, made.mesh.world_size, folder, timeout_seconds=600)):
                print(mesh, f"rank {rank}:", ", ".join(f"{name} {x:.2f}" for name, x in row.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
