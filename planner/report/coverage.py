"""The ops of a model that have no rule: ``python -m planner.report.coverage MODEL… [--spec SPEC]``.

    no rule      carries a gradient, or reads a value that does: every rank computes all of it
    input-only   made of inputs and constants alone (masks, positions): the same on every rank, needs no rule

MODEL is as for ``meshwright plan``. Without a spec, a Hugging Face model is given a small batch by its kind. Exit 1 if
some op has no rule.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from passes.errors import PlanError
from passes.partition.options.table import has_rule
from passes.program.program import Program
from passes.program.source_lines import where_of
from planner.capture.export import capture
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec

BATCH, LENGTH = 2, 8


@dataclass
class Coverage:
    """``missing``: op → places in the user's code. ``input_only``: op → how often. ``num_ops``: calls looked at."""

    missing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    input_only: Counter[str] = field(default_factory=Counter)
    num_ops: int = 0

    def add(self, program: Program) -> None:
        """Count the calls of one captured model."""
        for node in program.graph.graph.nodes:
            if node.op != "call_function":
                continue
            self.num_ops += 1
            if has_rule(node.target):
                continue
            if node.meta.get("grad") or any(n.meta.get("grad") for n in node.all_input_nodes):
                self.missing[str(node.target)].append(str(where_of(node)))
            else:
                self.input_only[str(node.target)] += 1

    def __str__(self) -> str:
        lines = [f"{self.num_ops} ops"]
        lines += [
            f"no rule      {op}  ({len(places)} times)  at {places[0]}" for op, places in sorted(self.missing.items())
        ]
        lines += [f"input-only   {op}  ({count} times)" for op, count in sorted(self.input_only.items())]
        return "\n".join(
            [*lines, "every op with a gradient has a rule" if not self.missing else "some ops have no rule"]
        )


def example_batches(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Small batches that a Hugging Face model of some kind would take, likeliest first."""
    config: Any = getattr(model, "config", None)
    text: Any = getattr(config, "text_config", config)
    labels = torch.zeros(BATCH, dtype=torch.long)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size, channels = getattr(config, "image_size", 32), getattr(config, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        yield {"pixel_values": torch.zeros(BATCH, channels, height, width), "labels": labels}
        return
    length = min(LENGTH, getattr(text, "max_position_embeddings", LENGTH) or LENGTH)
    tokens = torch.full((BATCH, length), 3, dtype=torch.long)
    mask = torch.ones_like(tokens)
    for more in (
        {"labels": tokens},
        {"labels": labels},
        {"labels": tokens, "attention_mask": mask},
        {"start_positions": labels, "end_positions": labels},
    ):
        yield {"input_ids": tokens} | more


def captured(model: nn.Module, spec: Spec | None = None) -> Program:
    """The model's program on the inputs of ``spec``, else on the first example batch that gives a loss."""
    if spec is not None:
        shapes = spec.longest.require_inputs().items()
        return capture(
            model,
            {
                n: torch.empty((int(spec.batch.micro), *i.sizes), dtype=getattr(torch, i.dtype), device="meta")
                for n, i in shapes
            },
            has_rule=has_rule,
            loss=spec.loss,
        )
    error: PlanError | None = None
    for inputs in example_batches(model):
        try:
            return capture(model, inputs, has_rule=has_rule)
        except PlanError as problem:
            error = error or problem
    assert error is not None
    raise error


def main(arguments: list[str] | None = None) -> int:
    """The command: prints one list for all models together."""
    parser = argparse.ArgumentParser(
        prog="python -m planner.report.coverage", description="Ops in models that have no rule."
    )
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="models, named as for `meshwright plan`: hf:config.json"
    )
    parser.add_argument("--spec", help="YAML file with the inputs of the models")
    given = parser.parse_args(arguments)
    spec = Spec.load(given.spec) if given.spec else None
    coverage, failed = Coverage(), False
    for reference in given.models:
        try:
            coverage.add(captured(load_model(reference), spec))
        except PlanError as error:
            failed = True
            print(f"{reference}: {error}", file=sys.stderr)
    print(coverage)
    return 1 if coverage.missing or failed else 0


if __name__ == "__main__":
    sys.exit(main())
