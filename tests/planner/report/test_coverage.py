"""The command that lists ops without a rule."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.report.coverage import Coverage, captured, main
from tests.models.hugging_face import write_configs
from tests.tools.captured import capture

pytest.importorskip("transformers")


@pytest.mark.thorough
def test_the_command_reads_configs(tmp_path, capsys):
    paths = {path.name: path for path in write_configs(tmp_path)}
    assert main([f"hf:{paths[name]}" for name in ("gpt2", "vit", "bert_classes")]) == 0
    printed = capsys.readouterr().out
    assert "every op with a gradient has a rule" in printed
    assert "input-only   aten.arange" in printed


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.linalg.inv(self.weight) @ x).sum()


@pytest.mark.thorough
def test_an_op_without_a_rule_is_listed_with_its_line():
    coverage = Coverage()
    coverage.add(capture(Odd(), {"x": torch.ones(4, 4)}))
    ((op, places),) = coverage.missing.items()
    assert "linalg_inv" in op
    assert "test_coverage.py" in places[0]


def test_a_model_that_is_not_there_is_an_error_and_exit_1(capsys):
    assert main(["hf:no-such-directory"]) == 1
    assert "no directory no-such-directory" in capsys.readouterr().err


def test_a_spec_gives_the_inputs():
    from planner.spec.spec import Spec

    spec = Spec.load(
        {
            "mesh": {"tp": 1, "pp": 1, "dp": 1},
            "batch": {"global": 4, "micro": 4},
            "inputs": {"x": {"shape": [4], "dtype": "float32"}},
            "optimizer": {"name": "adamw", "lr": 1e-3},
        }
    )
    assert captured(Odd(), spec).inputs == {"x": "x"}
