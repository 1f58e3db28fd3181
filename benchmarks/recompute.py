"""Memory saved and time spent by recomputing GPT-2 (12 layers, 768 wide, 12 heads): one microbatch, forward and
backward.

    python benchmarks/recompute.py [--length 512] [--rounds 3] [--dropout 0.1]

Bytes are those of all memory that a forward leaves behind for its backward, by part: of blocks, and of the rest (logits
and loss, which no block holds). Time is CPU seconds of this process, the least of the rounds, kinds in turns.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from passes.base import RankProgram, StageModule
from planner import plan
from planner.lower import lower
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.tools.saved_memory import Made

KINDS = ("none", "full", "selective")


def model_of(dropout: float, layers: int) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, use_cache=False, **drop)).train()


class Run:
    """One kind: its stage, with weights of its own."""

    def __init__(self, kind: str, model: nn.Module, length: int) -> None:
        given = {"shape": [length], "dtype": "int64", "high": 50257}
        inputs = {"input_ids": given, "labels": {"like": "input_ids"}}
        self.kind = kind
        made = plan(model, {"mesh": {}, "batch": {"global": 1, "micro": 1}, "inputs": inputs, "recompute": kind})
        self.program: RankProgram = lower(made, 0)
        fill(self.program.stages, ModelWeights(model), made.mesh, made.mesh.place(0), torch.device("cpu"))
        (self.stage,) = self.program.stages
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(50257, (1, length), generator=generator)
        self.given = [ids for _ in self.stage.inputs] + [torch.tensor(float(length - 1), dtype=torch.float64)]
        self.given = self.given[: len(self.stage.inputs) + len(self.stage.denominators)]
        self.seconds: list[float] = []

    def forward(self) -> Tensor:
        self.program.random.begin(0, 0)
        return self.stage.module(*self.given)[-1]

    def time(self) -> None:
        before = time.process_time()
        self.forward().backward()
        self.seconds.append(time.process_time() - before)

    def kept_bytes(self) -> int:
        with Made() as memory:
            loss = self.forward()
        kept = memory.alive_bytes(apart=held_by(self.stage))
        del loss
        return kept

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.stage.module.parameters() if p.grad is not None]


def held_by(stage: StageModule) -> list[Tensor]:
    return [*stage.module.parameters(), *stage.module.buffers()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    without_blocks = Run("none", model_of(asked.dropout, 1), asked.length).kept_bytes()
    one_more = Run("none", model_of(asked.dropout, 2), asked.length).kept_bytes() - without_blocks
    rest = without_blocks - one_more
    model = model_of(asked.dropout, 12)
    runs = [Run(kind, model, asked.length) for kind in KINDS]
    kept = {run.kind: run.kept_bytes() for run in runs}
    for run in runs:
        run.time()
        for other in runs[:1]:
            pairs = zip(other.gradients(), run.gradients(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"{run.kind}: other gradients"
        run.seconds.clear()
    for _ in range(asked.rounds):
        for run in runs:
            for p in run.stage.module.parameters():
                p.grad = None
            run.time()
    base = runs[0]
    print(f"GPT-2, 12 layers, sequence {asked.length}, 1 sequence, dropout {asked.dropout}, float32, 1 thread")
    print("| kind | MiB kept by blocks | of none | MiB kept by the rest | CPU s | of none |\n|---|---|---|---|---|---|")
    for run in runs:
        blocks, least = kept[run.kind] - rest, min(run.seconds)
        share = blocks / (kept["none"] - rest)
        cells = (run.kind, f"{blocks / 2**20:.1f}", f"{share:.3f}", f"{rest / 2**20:.1f}", f"{least:.2f}")
        print(f"| {' | '.join(cells)} | {least / min(base.seconds):.3f} |")


if __name__ == "__main__":
    main()
