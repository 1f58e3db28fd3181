"""Bad input ends with one error: what, where and how to fix it; exit code 2, no traceback, no rank left over."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from examples.gpt import GPT
from planner import PlanError, plan
from tests.models import refused
from tests.tools import jobs
from tests.tools.laboratory import Case, Lab

INPUTS = "inputs: {input_ids: {shape: [8], dtype: int64, high: 256}, labels: {like: input_ids}}"
SPEC = f"""mesh: {{tp: 2, pp: 2}}
batch: {{global: 8, micro: 2}}
{INPUTS}
optimizer: {{lr: 1.0e-3, betas: [0.9, 0.95]}}
"""


class GptOfLabels(nn.Module):
    """The GPT of the examples under the names of SPEC."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(vocabulary=256, length=8, width=32, num_layers=4, num_heads=4)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.gpt(input_ids, labels)[1]


def error_of(directory: Path, model: nn.Module, text: str) -> PlanError:
    path = directory / "spec.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        plan(model, path)
    error = caught.value
    assert error.what
    assert error.fix
    assert len(str(error).splitlines()) == 3, str(error)
    return error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("old", "new", "where", "what", "fix"),
    [
        ("mesh:", "mash:", "spec.yaml:1", "unknown key 'mash'", "did you mean 'mesh'"),
        ("pp: 2", "pipe: 2", "spec.yaml:1", "unknown key 'pipe' in mesh", "did you mean"),
        ("lr:", "learning_rate:", "spec.yaml:4", "unknown key 'learning_rate' in optimizer", "lr"),
        ("tp: 2", "tp: two", "spec.yaml:1", "mesh.tp must be a whole number", "whole number"),
        ("tp: 2", "tp: 2.5", "spec.yaml:1", "mesh.tp must be a whole number", "whole number"),
        ("pp: 2", "pp: 0", "spec.yaml:1", "mesh.pp is 0", "1 or more"),
        ("lr: 1.0e-3", "lr: fast", "spec.yaml:4", "optimizer.lr must be a number", "number"),
        ("[0.9, 0.95]", "[0.9]", "spec.yaml:4", "optimizer.betas must have 2 items", "2 items"),
        ("int64", "int", "spec.yaml:3", "inputs.input_ids.dtype", "did you mean 'int8'"),
        ("global: 8", "global: 9", "spec.yaml:2", "batch.global = 9 is not divisible by", "8 or 10"),
        ("pp: 2", "pp: 5", "spec.yaml:1", "pp 5 stages, but the model has only 4 blocks", "pp · vpp ≤ 4"),
        ("optimizer:", "pipeline: {split: [3, 2]}\noptimizer:", "spec.yaml:4", "adds up to 5", "add up to 4"),
        ("optimizer:", "pipeline: {split: [1, 1, 2]}\noptimizer:", "spec.yaml:4", "has 3 stages", "list 2 numbers"),
        ("pp: 2}", "pp: 2, vpp: 1}\npipeline: {schedule: zero_bubble_v}", "spec.yaml:1", "but vpp = 1", "set vpp to 2"),
        ("pp: 2}", "pp: 2, vpp: 3}\npipeline: {schedule: zero_bubble_v}", "spec.yaml:1", "but vpp = 3", "set vpp to 2"),
        ("pp: 2}", "pp: 1}\npipeline: {schedule: zero_bubble_v}", "spec.yaml:2", "but pp = 1", "1f1b"),
        (
            "pp: 2}",
            "pp: 2, vpp: 2}\npipeline: {schedule: zero_bubble_v, split: [1, 1, 2]}",
            "spec.yaml:2",
            "has 3 stages",
            "list 4 numbers",
        ),
        ("optimizer:", "loss: {output: los}\noptimizer:", "spec.yaml:4", "no scalar output `los`", "name one of"),
        ("optimizer:", "loss: none.py:f\noptimizer:", "spec.yaml:4", "no file none.py", "path/file.py:function"),
        ("optimizer:", "loss: math:sin\noptimizer:", "spec.yaml:4", "takes (x, /), not (outputs, batch)", "def loss"),
        ("1.0e-3", "1.0e-3, schedule: {kind: none.py:f}", "spec.yaml:4", "no file none.py", "path/file.py:function"),
        ("1.0e-3", "1.0e-3, schedule: {kind: 'math:log'}", "spec.yaml:4", "failed at step 0", "returns the factor"),
        ("1.0e-3", "1.0e-3, schedule: {kind: 'math:pi'}", "spec.yaml:4", "is a float, not a function", "path/file"),
        ("1.0e-3", "1.0e-3, schedule: {kind: 'sys:exit'}", "spec.yaml:4", "failed at step 0: SystemExit", "an int"),
        (INPUTS, "", "spec.yaml", "inputs is missing", "add `inputs:"),
        (
            "labels: {",
            "label: {",
            "spec.yaml:3",
            "missing a required argument: 'labels'",
            "arguments of the model's forward",
        ),
        ("labels: {like: input_ids}", "labels: {like: ids}", "spec.yaml:3", "ids", "input_ids"),
        ("mesh: {", "mesh: [", "spec.yaml", "", ""),
    ],
)
def test_a_bad_spec_is_one_error_at_its_line(
    tmp_path: Path, old: str, new: str, where: str, what: str, fix: str
) -> None:
    assert old in SPEC
    error = error_of(tmp_path, GptOfLabels(), SPEC.replace(old, new, 1))
    assert where in str(error.where)
    assert what in error.what
    assert fix in error.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("split", "what", "pointer", "fix"),
    [
        ("Et*3|xL", "pipeline.split: `x` is not a layer, at character 6", 5, "write E (embedding), t (a block) and L"),
        ("Et*3|ttL", "pipeline.split has 5 blocks (t), but the model has 4, at character 7", 6, "write 4 t in total"),
        ("Et*3|tt|L", "pipeline.split has 3 stages, mesh.pp · mesh.vpp = 2 · 1 = 2, at character 8", 7, "write 1 `|`"),
        ("Et*3|m", "pipeline.split: multi-token prediction (m) is not supported", 5, "remove m"),
    ],
)
def test_a_bad_layout_is_one_error_at_its_line_that_points_at_the_character(
    tmp_path: Path, split: str, what: str, pointer: int, fix: str
) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"{SPEC}pipeline: {{split: {split}}}\n")
    with pytest.raises(PlanError) as caught:
        plan(GptOfLabels(), path)
    first, text, caret, where, last = str(caught.value).splitlines()
    assert first.startswith(what)
    assert (text, caret) == (f"    {split}", f"    {' ' * pointer}^")
    assert where == "  at:  spec.yaml:5"
    assert last.startswith(f"  fix: {fix}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "module", "what", "fix"),
    [
        (refused.Branch, "layers.1", "data-dependent", "torch.where"),
        (refused.MaskedRows, "", "depends on data", "x[token] or x[mask]"),
        (refused.NumberInPython, "", "a number read from a tensor", "without .item()"),
        (refused.Numpy, "", "numpy", "no numpy"),
        (refused.TensorHook, "layers.1", "a hook on a gradient would be lost", "remove the hook"),
        (refused.ParameterHook, "head", "a hook on the gradients of parameter head.weight", "remove the hook"),
        (refused.ModuleHook, "layers.1", "a hook on the gradients of module layers.1", "remove the hook"),
        (refused.MaxNorm, "embed", "writes into parameter embed.weight", "max_norm"),
        (refused.ScaledByFrequency, "embed", "counts in the batch", "remove scale_grad_by_freq"),
    ],
)
def test_a_model_that_cannot_be_captured_names_its_line(
    tmp_path: Path, model: Callable[[], nn.Module], module: str, what: str, fix: str, capfd: pytest.CaptureFixture[str]
) -> None:
    error = error_of(tmp_path, model(), SPEC)
    lines = Path(refused.__file__).read_text().splitlines()
    assert error.where.line in [number for number, line in enumerate(lines, 1) if "# here" in line]
    assert error.where.file == refused.__file__
    assert error.where.module == module
    assert what in error.what
    assert fix in error.fix
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (refused.NoLoss, "no output of the model is a loss (outputs: logits [16, 256])"),
        (refused.TwoLosses, "several outputs could be the loss: main, size"),
        (refused.NoParameters, "no output of the model is a loss"),
    ],
)
def test_a_model_without_one_loss_lists_its_outputs(tmp_path: Path, model: Callable[[], nn.Module], what: str) -> None:
    assert what in error_of(tmp_path, model(), SPEC).what


@pytest.mark.thorough
def test_tp_that_divides_no_heads_names_the_attention_and_the_nearest_sizes(tmp_path: Path) -> None:
    error = error_of(tmp_path, GptOfLabels(), SPEC.replace("tp: 2", "tp: 3"))
    assert "4 query heads" in error.what
    assert "tp = 3" in error.what
    assert error.where.module == "gpt.blocks.0.attention"
    assert "scaled_dot_product_attention" in error.where.code
    assert "{2, 4}" in error.fix


@pytest.mark.thorough
def test_an_override_that_names_nothing_is_an_error_at_its_line(tmp_path: Path) -> None:
    text = SPEC + "tensor_parallel: {overrides: {'*.nothing': replicate}}\n"
    error = error_of(tmp_path, GptOfLabels(), text)
    assert "`*.nothing` matches no parameter" in error.what
    assert "spec.yaml:5" in str(error.where)


@pytest.mark.thorough
@pytest.mark.parametrize("change", [name for name in jobs.CHANGES if name != "other tokens"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"tp": 2}], ids=str)
def test_a_batch_that_is_not_the_plans_is_an_error_on_every_rank(lab: Lab, mesh: dict[str, int], change: str) -> None:
    errors = lab.run(Case("gpt", mesh, job=jobs.bad_batch, job_arguments=(change,)))
    assert len({error.removeprefix(f"rank {rank}: ") for rank, error in enumerate(errors)}) == 1
    assert re.search(r"the batch|batch\[", errors[0])
    assert "fix:" in errors[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change", ["a key too few", "too few sequences", "other length", "other dtype", "other tokens"]
)
def test_a_first_batch_that_differs_on_one_rank_is_an_error_on_every_rank(lab: Lab, change: str) -> None:
    errors = lab.run(Case("gpt", {"tp": 2, "pp": 2}, job=jobs.batch_of_one_rank, job_arguments=(change,)))
    assert len(errors) == 4
    assert all("batch" in error and "fix:" in error for error in errors)
    # Which of two batches is the wrong one is not known: the ranks that came second are named.
    assert "rank 3" in errors[0] or (change == "other tokens" and "rank 0" in errors[3])


@pytest.mark.thorough
def test_plans_that_differ_between_ranks_are_an_error_on_every_rank(lab: Lab) -> None:
    errors = lab.run(Case("gpt", {"tp": 2, "pp": 2}, job=jobs.plans_that_differ))
    assert len(set(errors)) == 1
    assert "the plan (by hash) differs between ranks: rank 3 of 4" in errors[0]


def test_a_plan_for_another_world_is_an_error_on_every_rank(lab: Lab) -> None:
    errors = lab.run(Case("gpt", {"tp": 2}, job=jobs.plan_for_another_world, job_arguments=({"tp": 2, "pp": 2},)))
    assert len(set(errors)) == 1
    assert "the plan is for 4 ranks (tp 2 · pp 2), but 2 were launched" in errors[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "value"), [("input_ids", 97), ("input_ids", -1), ("targets", 97), ("targets", -5)])
def test_a_token_outside_a_cut_vocabulary_is_an_error_as_in_one_process(lab: Lab, name: str, value: int) -> None:
    errors = lab.run(Case("gpt", {"tp": 2}, job=jobs.id_errors, job_arguments=(name, value)))
    assert all("[0, 97)" in error and "microbatch 0" in error for _, error in errors)
    assert all(f"batch['{name}'] holds {value} at [0, 0]; the " in checked for checked, _ in errors)
