"""Adapters of peft in and out of engines: the bytes of its files, merges, and adapters that do not fit."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner import Plan, PlanError, plan
from runtime.engine.engine import Engine
from tests.models import families
from tests.tools.laboratory import Case, Lab, name_of
from tests.tools.limits import HANG_SECONDS
from tests.tools.specs import entry_inputs

peft = pytest.importorskip("peft")

LAYOUTS = [{"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"dp": 2}]
KINDS = ["lora-all-linear", "dora", "lora-with-head", "lora-both", "ia3", "vera", "p-tuning", "gpt2-lora", "t5-lora"]
FILES = ("adapter_model.safetensors", "adapter_config.json")


def trained_and_saved(plan: Any, batches: list[dict[str, Tensor]], directory: str) -> dict[str, Tensor]:
    """Parameters on rank 0 after a step; ``directory`` has adapters/ and, if they can be merged, merged/."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.train_step(batches[0])
        engine.save_adapters(f"{directory}/adapters")
        if hasattr(plan.hub.adapted.module, "merge_and_unload"):
            engine.save_merged(f"{directory}/merged", max_shard_bytes=20_000)
        return engine.gather_parameters()


def loaded(plan: Any, batches: list[dict[str, Tensor]], directory: str) -> tuple[dict[str, Tensor], float]:
    """Parameters on rank 0 after loading, and the loss of the next step."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        engine.load_adapters(f"{directory}/adapters")
        parameters = engine.gather_parameters()
        return parameters, engine.train_step(batches[1]).loss


def one_process(kind: str, parameters: dict[str, Tensor]) -> Any:
    """The wrapped model with these parameters."""
    model = families.build(kind).model
    model.load_state_dict(parameters, strict=False)
    return model


@pytest.mark.thorough
@pytest.mark.covering(pairs=1)
@pytest.mark.parametrize("mesh", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("kind", KINDS)
def test_files_have_the_bytes_that_peft_writes_in_one_process(
    lab: Lab, kind: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    case = Case(kind, mesh, job=trained_and_saved, job_arguments=(str(tmp_path),))
    model = one_process(kind, lab.run(case)[0])
    model.save_pretrained(tmp_path / "expected")
    assert not (tmp_path / "adapters" / "README.md").exists()
    for adapter in model.peft_config:
        inner = "" if adapter == "default" else adapter
        weights, config = ((tmp_path / "adapters" / inner / f, tmp_path / "expected" / inner / f) for f in FILES)
        assert weights[0].read_bytes() == weights[1].read_bytes()
        made, expected = (json.loads(path.read_text()) for path in config)
        assert as_sets(made) == as_sets(expected)
    if (tmp_path / "merged").exists():
        assert_merged(model, tmp_path / "merged")


@pytest.mark.thorough
def test_adapters_of_expert_stacks_have_the_bytes_that_peft_writes(lab: Lab, tmp_path: Path) -> None:
    rest = {"precision": {"parameters": "float32"}}
    arguments = (str(tmp_path),)
    case = Case("mixtral-lora-experts", {"dp": 2, "ep": 2}, rest, job=trained_and_saved, job_arguments=arguments)
    model = one_process(case.model, lab.run(case)[0]).float()
    model.save_pretrained(tmp_path / "expected")
    written, expected = (tmp_path / name / FILES[0] for name in ("adapters", "expected"))
    assert written.read_bytes() == expected.read_bytes()
    assert_merged(model, tmp_path / "merged", torch.float32)


def as_sets(config: dict[str, Any]) -> dict[str, Any]:
    """Lists of names in no order, as peft writes sets."""
    return {key: sorted(value) if isinstance(value, list) else value for key, value in config.items()}


def assert_merged(model: Any, directory: Path, dtype: torch.dtype = torch.float64) -> None:
    """transformers loads the directory, and its weights are those of peft's own merge."""
    truth = model.merge_and_unload()
    found = type(truth).from_pretrained(directory, dtype=dtype)
    expected = dict(truth.named_parameters())
    assert dict(found.named_parameters()).keys() == expected.keys()
    for name, value in found.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=0.0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["lora-all-linear", "lora-both", "prompt", "vera"])
def test_another_layout_loads_what_a_layout_saved(lab: Lab, kind: str, tmp_path: Path) -> None:
    saving = Case(kind, {"tp": 2, "pp": 2}, job=trained_and_saved, job_arguments=(str(tmp_path),))
    saved = lab.run(saving)[0]
    found, loss = lab.run(Case(kind, {"tp": 4}, job=loaded, job_arguments=(str(tmp_path),)))[0]
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], value) for name, value in saved.items())
    entry = families.build(kind)
    with torch.no_grad():
        expected = entry.loss(one_process(kind, saved)(**entry.batch(8, 1)))
    assert loss == pytest.approx(expected.item(), rel=2e-6)


# ---- one process


@cache
def model_and_plan(kind: str) -> tuple[nn.Module, Plan]:
    """Engines may follow each other while the model is kept."""
    entry = families.build(kind)
    inputs = entry_inputs(entry)
    return entry.model, plan(entry.model, {"mesh": {}, "batch": {"global": 2, "micro": 2}, "inputs": inputs})


def planned(kind: str) -> Plan:
    return model_and_plan(kind)[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    with Engine(planned("lora")) as engine:
        engine.save_adapters(directory)
    return directory


def changed(saved: Path, directory: Path, **settings: Any) -> Path:
    """A copy with other settings."""
    for name in FILES:
        (directory / name).write_bytes((saved / name).read_bytes())
    config = json.loads((saved / FILES[1]).read_text())
    (directory / FILES[1]).write_text(json.dumps(config | settings))
    return directory


def refusal(kind: str, call: Callable[[Engine], Any]) -> str:
    """The error of a call, after which no parameter has changed."""
    with Engine(planned(kind)) as engine:
        before = engine.gather_parameters()
        with pytest.raises(PlanError) as caught:
            call(engine)
        after = engine.gather_parameters()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(caught.value)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"base_model_name_or_path": "someone/another-base"}, "trained on the base someone/another-base"),
        ({"lora_alpha": 16}, "the adapter has lora_alpha: 16, the planned one 8"),
        ({"target_modules": ["q_proj"]}, "the adapter has target_modules: ['q_proj']"),
        ({"peft_type": "IA3"}, "the adapter has peft_type: IA3"),
    ],
)
def test_an_adapter_of_another_base_or_config_is_one_error(
    saved: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    given = changed(saved, tmp_path, **settings)

    def load(engine: Engine) -> None:
        engine.plan.hub.adapted.module.peft_config["default"].base_model_name_or_path = "someone/base"
        engine.load_adapters(given)

    assert words in refusal("lora", load)


@pytest.mark.thorough
def test_tensors_of_another_shape_are_named_with_both_shapes(saved: Path) -> None:
    words = refusal("lora-patterns", lambda engine: engine.load_adapters(changed_to_patterns(saved)))
    assert "layers.1.self_attn.q_proj.lora_A.weight has shape [4, 32], the model has [2, 32]" in words


def changed_to_patterns(saved: Path) -> Path:
    """The tensors of a LoRA of one rank, with a config that has several."""
    directory = saved / "patterns"
    directory.mkdir(exist_ok=True)
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    return changed(saved, directory, **patterns)


@pytest.mark.thorough
def test_a_directory_without_adapters_is_refused(tmp_path: Path) -> None:
    assert "adapter_config.json" in refusal("lora", lambda engine: engine.load_adapters(tmp_path))


@pytest.mark.thorough
def test_the_encoder_of_virtual_tokens_is_not_in_peft_s_files(tmp_path: Path) -> None:
    def load(engine: Engine) -> None:
        engine.save_adapters(tmp_path)
        engine.load_adapters(tmp_path)

    assert "peft saves only the result of the module that makes prompt_embeddings" in refusal("p-tuning", load)


@pytest.mark.thorough
def test_a_method_without_a_merge_is_refused(tmp_path: Path) -> None:
    words = refusal("prompt", lambda engine: engine.save_merged(tmp_path / "merged"))
    assert "cannot be merged" in words
    assert "PROMPT_TUNING" in words
    assert not (tmp_path / "merged").exists()


def test_save_pretrained_of_an_adapted_model_names_the_two_calls_to_use(tmp_path: Path) -> None:
    words = refusal("lora", lambda engine: engine.save_pretrained(tmp_path))
    assert "save_adapters" in words
    assert "save_merged" in words


def test_a_model_without_adapters_is_refused(tmp_path: Path) -> None:
    assert "no adapters of peft" in refusal("llama", lambda engine: engine.save_adapters(tmp_path))


def test_a_text_beside_the_adapters_stays(saved: Path) -> None:
    (saved / "README.md").write_text("my own")
    with Engine(planned("lora")) as engine:
        engine.save_adapters(saved)
    assert (saved / "README.md").read_text() == "my own"
