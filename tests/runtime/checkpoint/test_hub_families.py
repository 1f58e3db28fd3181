"""From files of the Hub through three steps and back, for families whose files hold other tensors than the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.capture.model.reference import load_model

pytest.importorskip("transformers")

from tests.models.hub_families import FAMILIES
from tests.tools.checkpoints import assert_same
from tests.tools.hub_directories import (
    LAYOUTS,
    most_bytes_while_writing,
    saved,
    stored,
    trained_alone,
    trained_by_ranks,
)

BITWISE = ("zero 3", "pp 2")  # two microbatches, one by one, whose gradients are added
# differ in the last bit: a microbatch adds two gradients to a tied weight; over dp, that of a gate of one row
NEARLY = {
    *(("ernie4_5_moe", layout) for layout in BITWISE),
    *((family, "zero 3") for family in ("qwen2_moe", "qwen3_next")),
}


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_trained_and_written_again_as_by_one_process(family, layout, tmp_path, lab):
    """Bitwise on every layout: a copy without a step, and the export of what the ranks hold after three steps.

    Over zero 3 and pp 2 these are also bitwise those of our engine in one process. Over tp and ep they cannot be: parts
    of a sum are added in another order (2e-8 and 3e-16 after three steps), and transformers' one process sums the rows
    of both microbatches at once, with norms in float32 (3e-8).
    """
    saved(family, tmp_path / "in", torch.float64)
    trained = lab.call(trained_by_ranks, tmp_path, layout)
    given, written = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert_as_in_files(stored(tmp_path / "copied"), given)
    assert {n: t.shape for n, t in written.items()} == {n: t.shape for n, t in given.items()}
    assert any(not torch.equal(written[name], tensor) for name, tensor in given.items())
    found = load_model(f"hf:{tmp_path / 'out'}", materialize=True)
    assert_same(dict(found.named_parameters(remove_duplicate=False)), trained)
    held, wanted = found.state_dict(), trained_alone(tmp_path)
    assert all(torch.equal(held[name], value) for name, value in wanted.items() if name not in trained)
    differences = {name: (held[name] - value).abs().max().item() for name, value in wanted.items()}
    assert max(differences.values()) < 1e-7, max(differences.items(), key=lambda pair: pair[1])
    if layout in BITWISE:
        one = lab.call(trained_by_ranks, tmp_path, "one", "alone")
        if (family, layout) in NEARLY:
            assert max((trained[name] - value).abs().max().item() for name, value in one.items()) < 1e-15
        else:
            assert_same(trained, one)


def assert_as_in_files(copied: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Bit by bit, but for the dtype of what transformers keeps in float32."""
    assert copied.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(copied[name], tensor.to(copied[name].dtype)), name


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["tp 2", "ep 2"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_rank_0_holds_one_tensor_of_the_files_while_it_writes(family, layout, tmp_path, lab):
    experts = {"num_local_experts": 16} if family == "mixtral" else {"n_routed_experts": 16}
    model = saved(family, tmp_path / "in", **experts)
    most = lab.call(most_bytes_while_writing, tmp_path, layout)
    largest = max(value.nbytes for value in stored(tmp_path / "in").values())
    assert max(value.nbytes for value in model.parameters()) > 8 * largest  # the stack of all experts
    assert 0 < most[0] <= 3 * largest
    assert most[1] <= 2 * largest
