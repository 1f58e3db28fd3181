"""Verify models of the catalogue and print the results, a line of JSON each.

One process for all of them, since importing torch takes longer than verifying a small model. It runs until it is done,
or ends with the model that ends it: the command then starts another for the rest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import yaml

import runtime.verify.run
from benchmarks.other_models.catalogue import Listed, find
from planner import PlanError
from runtime.distributed.launch import PRELOADED, RankError

RANKS_SECONDS = 500
# Modules that each rank would import: their server has them from the start.
SLOW_IMPORTS = {
    "diffusers": "diffusers.models.transformers.transformer_flux",
    "litgpt": "litgpt.model",
    "open-clip-torch": "open_clip",
    "openai-whisper": "whisper.model",
    "timm": "timm",
    "torchtune": "torchtune.models.llama3",
    "vit-pytorch": "vit_pytorch",
}


def main(builds: list[str]) -> None:
    torch.set_num_threads(1)
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of packages is not a row
    sources = {find(build).source for build in builds}
    PRELOADED.extend(["runtime.verify.run", *(SLOW_IMPORTS[s] for s in sources if s in SLOW_IMPORTS)])
    for build in builds:
        with tempfile.TemporaryDirectory() as directory:
            spec = Path(directory, "spec.yaml")
            spec.write_text(yaml.safe_dump(find(build).spec(), sort_keys=False))
            rows.write(json.dumps(measure(find(build), str(spec))) + "\n")
            rows.flush()


def measure(listed: Listed, spec: str) -> dict[str, Any]:
    """The result of `meshwright verify`, and the figures of the plan that it makes."""
    row: dict[str, Any] = {"version": listed.version}
    planned = runtime.verify.run.plan

    def plan(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        decided = planned(*args, **kwargs)
        row.update(figures(decided), plan_seconds=time.perf_counter() - start)
        return decided

    start = time.perf_counter()
    runtime.verify.run.plan = plan
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = runtime.verify.run.verify(listed.reference, spec, timeout_seconds=RANKS_SECONDS)
        row |= {"result": "EQUAL" if report.passed else "DIFFERENT", "detail": str(report)}
        row["differences"] = {kind: largest(report.rows, kind) for kind in ("loss", "gradient", "parameter")}
    except PlanError as error:
        row |= {"result": "refused", "detail": str(error)}
    except RankError as error:
        row |= {"result": "failed", "detail": str(error)}
    finally:
        runtime.verify.run.plan = planned
    return row | {"seconds": time.perf_counter() - start}


def largest(rows: Any, kind: str) -> float:
    return max((row.difference for row in rows if row.kind == kind), default=0.0)


def figures(decided: Any) -> dict[str, Any]:
    """Share of FLOPs over tp, tp collectives of the block that has most, and the warnings of the plan."""
    blocks: Counter[str] = Counter()
    for row in decided.collectives:
        if row.axis == "tp" and row.per == "microbatch" and row.phase in ("forward", "backward"):
            blocks[row.block] += row.count
    outside = blocks.pop("", 0)
    found = [d.what + (f" ({d.where})" if d.where else "") for d in decided.diagnostics if d.level == "warning"]
    return {
        "flops": decided.summary.flops_sharded_fraction,
        "collectives": str(max(blocks.values())) if blocks else f"{outside} in all",
        "warnings": found,
        "whole": [p.name for p in decided.parameters if p.style == "replicate" and len(p.shape) > 1],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
