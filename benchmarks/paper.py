"""The measurements of two papers beside the predictions: `python -m benchmarks.paper`.

Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053): weak scaling (figure 5), attention heads (table 7), strong
scaling (table 8), from specs/clusters/dgx-2h.yaml; nothing is fitted to a row. Narayanan et al. 2021, "Efficient
Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv:2104.04473): table 1, from
specs/clusters/dgx-a100.yaml, three fractions of which were fitted to it. Runs that nothing was fitted to:
`python -m benchmarks.predicted`.

The models are GPT-2s of the sizes in the papers, on the meta device, with attention written out as in those years.
Three layers are planned, and the middle one represents all between the first and the last: equal layers cost the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from planner import plan
from planner.cluster.cluster import Cluster, read_cluster
from planner.cost.cut.units import CutWork
from planner.cost.estimate import Estimate
from planner.cost.layout import CostPlan, Layout
from planner.cost.planned import cut_work
from planner.mesh import Mesh
from planner.spec.spec import Spec

VOCABULARY = 50257
PLANNED_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Gpt:
    """The sizes of a GPT-2."""

    hidden: int
    heads: int
    layers: int
    length: int = 1024
    vocabulary: int = VOCABULARY

    def flops(self, sequences: int) -> float:
        """Operations of a step with all activations computed twice (Narayanan et al. 2021, section 5.1)."""
        s, h, n = self.length, self.hidden, self.layers
        return 96.0 * sequences * s * n * h * h * (1 + s / (6 * h) + self.vocabulary / (16 * n * h))


@dataclass(frozen=True, slots=True)
class Run:
    """A model on a mesh: sequences of a microbatch, and of a step."""

    model: Gpt
    mesh: Mesh
    micro: int
    sequences: int
    fused: bool = False  # ops between products in one kernel, as Megatron-LM's own kernels did in 2021


def model_of(sizes: Gpt) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.length,
        n_embd=sizes.hidden,
        n_head=sizes.heads,
        n_layer=PLANNED_LAYERS,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config)


def spec_of(run: Run, dtype: str, cluster: str) -> dict[str, Any]:
    ids = {"shape": [run.model.length], "dtype": "int64", "high": run.model.vocabulary}
    return {
        "mesh": {"tp": run.mesh.tp},
        "batch": {"global": run.micro, "micro": run.micro},
        "inputs": {"input_ids": ids, "labels": {"like": "input_ids"}},
        "precision": {"parameters": dtype, "gradients": dtype},
        "recompute": "full",
        "optimizer": {"zero": 0},  # neither cut the optimizer over replicas
        "compile": run.fused,
        "cluster": cluster,
    }


@cache
def work_of(model: Gpt, tp: int, dtype: str, fused: bool) -> CutWork:
    """The cut of the whole model over tp, from a plan of its first three layers."""
    spec = spec_of(Run(model, Mesh(tp=tp), 2, 2, fused), dtype, "dgx-2h")
    made = plan(model_of(model), spec)
    decisions, shards = made.to_run()
    work = cut_work(decisions, shards, Spec.load(spec), {"full"})
    return work.repeated((0, *[1] * (model.layers - 2), 2))


def predicted(run: Run, dtype: str, cluster: Cluster) -> CostPlan:
    """The cost of a step."""
    stages = run.mesh.pp * run.mesh.vpp
    count = run.sequences // (run.micro * run.mesh.dp)
    kind = "interleaved_1f1b" if run.mesh.vpp > 1 else "1f1b"
    sizes = tuple(run.model.layers // stages for _ in range(stages))
    layout = Layout(run.mesh, run.micro, count, False, "full", kind, sizes)
    spec = Spec.load(spec_of(run, dtype, cluster.name))
    return Estimate(work_of(run.model, run.mesh.tp, dtype, run.fused), layout, cluster, spec).cost


def speed(run: Run, dtype: str, cluster: Cluster) -> float:
    """Operations a second of one device, as the papers count them."""
    return run.model.flops(run.sequences) / predicted(run, dtype, cluster).step_seconds / run.mesh.world_size


# ---- Shoeybi et al. 2019

MODELS = {1: Gpt(1536, 16, 40), 2: Gpt(1920, 20, 54), 4: Gpt(2304, 24, 64), 8: Gpt(3072, 32, 72)}
ALONE = {1: 1.00, 2: 0.95, 4: 0.82, 8: 0.77}  # efficiency by tp
WITH_DP = {1: 0.96, 2: 0.83, 4: 0.79, 8: 0.74}  # with 64 replicas
HEADS = {16: 0.82, 24: 0.80, 32: 0.77}  # of the largest, tp 8
STRONG = {1: 1.0, 2: 1.64, 4: 2.34, 8: 2.98}  # speed of the smallest, batch 8
BASELINE = 39e12


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of a paper, and the prediction."""

    what: str
    measured: float
    predicted: float

    @property
    def relative(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_near(self) -> bool:
        """Within 5 points of the measured efficiency, or 8 % of it."""
        return abs(self.predicted - self.measured) <= 0.05 or abs(self.relative) <= 0.08


def first_paper(cluster: Cluster | None = None) -> list[Row]:
    cluster = cluster or read_cluster("dgx-2h")
    base = speed(Run(MODELS[1], Mesh(), 8, 8), "float16", cluster)
    rows = [Row("1.2 B on one V100, TFLOP/s", BASELINE / 1e12, base / 1e12)]
    for tp, model in MODELS.items():
        found = speed(Run(model, Mesh(tp=tp), 8, 8), "float16", cluster)
        rows.append(Row(f"weak scaling, tp {tp}", ALONE[tp], found / base))
    for tp, model in MODELS.items():
        found = speed(Run(model, Mesh(tp=tp, dp=64), 8, 512), "float16", cluster)
        rows.append(Row(f"weak scaling, tp {tp} with dp 64", WITH_DP[tp], found / base))
    for heads, measured in HEADS.items():
        found = speed(Run(Gpt(3072, heads, 72), Mesh(tp=8), 8, 8), "float16", cluster)
        rows.append(Row(f"8.3 B, tp 8, {heads} heads", measured, found / base))
    for tp, measured in STRONG.items():
        found = speed(Run(MODELS[1], Mesh(tp=tp), 8, 8), "float16", cluster)
        rows.append(Row(f"1.2 B, batch 8, speed on {tp}", measured, found * tp / base))
    return rows


# ---- Narayanan et al. 2021, table 1

# heads, hidden, layers, tp, pp, vpp, GPUs, batch, microbatch, TFLOP/s of a GPU; sequence 2048, vocabulary 51200.
# Microbatches and vpp are those of the script that the paper's authors published for this table.
TABLE = {
    "1.7 B": (24, 2304, 24, 1, 1, 1, 32, 512, 16, 137),
    "3.6 B": (32, 3072, 30, 2, 1, 1, 64, 512, 16, 138),
    "7.5 B": (32, 4096, 36, 4, 1, 1, 128, 512, 16, 142),
    "18.4 B": (48, 6144, 40, 8, 1, 1, 256, 1024, 8, 135),
    "39.1 B": (64, 8192, 48, 8, 2, 1, 512, 1536, 4, 138),
    "76.1 B": (80, 10240, 60, 8, 4, 3, 1024, 1792, 2, 140),
    "145.6 B": (96, 12288, 80, 8, 8, 2, 1536, 2304, 2, 148),
    "310.1 B": (128, 16384, 96, 8, 16, 2, 1920, 2160, 1, 155),
    "529.6 B": (128, 20480, 105, 8, 35, 3, 2520, 2520, 1, 163),
    "1008.0 B": (160, 25600, 128, 8, 64, 1, 3072, 3072, 1, 163),
}


def second_paper(cluster: Cluster | None = None) -> list[Row]:
    """TFLOP/s of a GPU, without overlap: that program had none."""
    cluster, rows = cluster or read_cluster("dgx-a100").model_copy(update={"overlap": 0.0}), []
    for name, (heads, hidden, layers, tp, pp, vpp, gpus, batch, micro, measured) in TABLE.items():
        mesh = Mesh(tp=tp, pp=pp, vpp=vpp, dp=gpus // (tp * pp))
        model = Gpt(hidden, heads, layers, 2048, 51200)
        found = speed(Run(model, mesh, micro, batch, fused=True), "float16", cluster)
        chunks = f" vpp {vpp}" if vpp > 1 else ""
        rows.append(Row(f"{name}, tp {tp} pp {pp}{chunks}, {gpus} GPUs", measured, found / 1e12))
    return rows


def table_of(rows: list[Row]) -> str:
    lines = ["| what | paper | predicted | off by |", "|---|---|---|---|"]
    lines += [f"| {r.what} | {r.measured:.4g} | {r.predicted:.3g} | {r.relative:+.1%} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    first = first_paper()
    print("## Shoeybi et al. 2019, from specs/clusters/dgx-2h.yaml\n")
    print(table_of(first))
    far = [row.what for row in first[1:] if not row.is_near]
    found = f"{len(first) - 1 - len(far)} of {len(first) - 1}"
    print(f"\nwithin 5 points or 8 %: {found}" + "".join(f"; not {what}" for what in far))
    second = second_paper()
    print("\n## Narayanan et al. 2021, table 1, TFLOP/s of a GPU, from specs/clusters/dgx-a100.yaml\n")
    print(table_of(second))
    mean = sum(abs(row.relative) for row in second) / len(second)
    print(f"\noff by {mean:.1%} on average, {max((abs(r.relative), r.what) for r in second)[0]:.1%} at most")


if __name__ == "__main__":
    main()
