"""Whatever is done to a spec, it loads or is one PlanError: no traceback, no hang, no memory spent."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from planner import plan
from planner.spec.spec import Spec
from tests.models.tiny import MLP, WIDTH
from tests.tools.mutations import mutants, peak_bytes, survivors
from tests.tools.paths import ROOT

SPECS = sorted([*(ROOT / "specs").glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])
VOCABULARY = 64


def written(value: Any) -> str:
    return yaml.safe_dump(value, allow_unicode=True, sort_keys=False)


def mutated(count: int, seed: int) -> list[str]:
    """Mutants of all specs in turn, without their comments: those are no place for mistakes."""
    texts = [written(yaml.safe_load(path.read_text())) for path in SPECS]
    return [m for text in texts for m in mutants(text, -(-count // len(texts)), seed, yaml.safe_load, written)]


def write(path: Path, text: str) -> Path:
    path.unlink(missing_ok=True)  # many file systems flush a file that is cut short and written again
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


def check_load(texts: list[str], path: Path) -> list[Spec]:
    before = peak_bytes()
    good, bad = survivors(texts, lambda text: Spec.load(write(path, text)))
    assert not bad, f"{len(bad)} of {len(texts)}:\n" + "\n".join(bad[:5])
    assert peak_bytes() - before < 1 << 30
    return good


def test_mutated_specs_load_or_are_one_error(tmp_path):
    good = check_load(mutated(500, seed=1), tmp_path / "spec.yaml")
    assert 10 < len(good) < 250


@pytest.mark.thorough
@pytest.mark.slow
def test_ten_thousand_mutated_specs_load_or_are_one_error(tmp_path):
    good = check_load(mutated(10_000, seed=2), tmp_path / "spec.yaml")
    assert 200 < len(good) < 5_000


class AnyInputs(nn.Module):
    """Takes the inputs of every example, under the names that they have there."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(MLP(0.0) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Any = None, targets: Any = None, attention_mask: Any = None) -> Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        labels = targets if labels is None else labels
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.thorough
@pytest.mark.slow
def test_what_loads_is_planned_or_is_one_error(tmp_path):
    path = tmp_path / "spec.yaml"
    loads = [text for text in mutated(500, seed=3) if survivors([text], lambda t: Spec.load(write(path, t)))[0]]
    sample = random.Random(3).sample(loads, min(40, len(loads)))
    with torch.device("meta"):
        model = AnyInputs()
    good, bad = survivors(sample, lambda text: plan(model, write(path, text)))
    assert not bad, f"{len(bad)} of {len(sample)}:\n" + "\n".join(bad[:5])
    assert len(good) > 5
