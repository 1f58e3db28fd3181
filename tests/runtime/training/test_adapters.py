"""``--peft``: a base and an adapter_config.json become the model that one process would make, and train."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from planner import Plan, PlanError, plan
from planner.capture.model.reference import load_model
from planner.spec.spec import Spec
from runtime.cli import app
from runtime.engine.engine import Engine
from tests.tools import pretrained_ranks as ranks
from tests.tools.checkpoints import assert_same

peft = pytest.importorskip("peft")

LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj", "down_proj"]}
# Adapters that begin as functions of the base: a norm, a copy, a decomposition that also changes the base.
OF_THE_BASE: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "copied head": {"modules_to_save": ["lm_head"]},
    "decomposed": {"init_lora_weights": "pissa"},
    "rows of the embedding": {"trainable_token_indices": [1, 3]},
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    ranks.save_random("llama", tmp_path / "base", vocab_size=256)  # bytes are tokens
    return tmp_path / "base"


def config_in(directory: Path, **settings: Any) -> Path:
    file = directory / "lora.json"
    file.write_text(json.dumps(LORA | settings))
    return file


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OF_THE_BASE)
def test_an_adapter_begins_as_in_one_process(base: Path, kind: str) -> None:
    reference = f"hf:{base} --peft {config_in(base.parent, **OF_THE_BASE[kind])}"
    model = load_model(reference, values_later=True)
    assert all(parameter.is_meta for parameter in model.parameters()) == (kind != "rows of the embedding")
    with Engine(plan(model, Spec.load(ranks.spec_of()))) as engine:
        engine.load_pretrained(base)
        found = engine.gather_parameters()
    expected = dict(load_model(reference, materialize=True).named_parameters(remove_duplicate=False))
    assert_same(found, {name: value.detach() for name, value in expected.items()})


@pytest.mark.thorough
def test_weights_of_the_base_are_needed_before_a_step(base: Path) -> None:
    model = load_model(f"hf:{base} --peft {config_in(base.parent, use_dora=True)}", values_later=True)
    with Engine(plan(model, Spec.load(ranks.spec_of()))) as engine:
        with pytest.raises(Exception, match="the weights of the base were not read"):
            engine.evaluate(ranks.batch())
        engine.load_pretrained(base)
        assert engine.evaluate(ranks.batch()) > 0


SPEC = """mesh: {}
batch: {global: 4, micro: 2}
inputs: {input_ids: {shape: [6], dtype: int64, high: 256}, labels: {like: input_ids}}
"""


def run(base: Path, *words: str, command: str = "train", spec: str = SPEC) -> Any:
    file, text = base.parent / "spec.yaml", base.parent / "text.txt"
    file.write_text(spec)
    text.write_text("To train an adapter, a text is needed. " * 20)
    data = ["--data", str(text)] if command in ("train", "evaluate") else []
    data += ["--steps", "2", "--quiet"] if command == "train" else []
    return CliRunner().invoke(app, [command, f"hf:{base}", str(file), *data, *words])


@pytest.mark.thorough
def test_a_run_writes_adapters_that_peft_loads_and_a_merge_that_transformers_loads(base: Path) -> None:
    transformers, out = pytest.importorskip("transformers"), base.parent
    words = (
        "--peft",
        str(config_in(out)),
        "--save-adapters",
        str(out / "adapters"),
        "--save-merged",
        str(out / "merged"),
    )
    assert run(base, *words).exit_code == 0
    wrapped = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), out / "adapters")
    assert any(value.abs().max() > 0 for name, value in wrapped.named_parameters() if "lora_B" in name)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out / "merged")
    assert_same(merged.state_dict(), wrapped.merge_and_unload().state_dict())


def saving(out: Path, config: Path) -> tuple[str, ...]:
    return "--peft", str(config), "--save", str(out / "run"), "--save-merged", str(out / "merged")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [*OF_THE_BASE, "mean"])
def test_an_export_of_a_save_is_the_merge_of_the_run(base: Path, kind: str) -> None:
    out, settings = base.parent, OF_THE_BASE.get(kind, {})
    assert run(base, *saving(out, config_in(out, **settings)), spec=SPEC + "optimizer: {ema: 0.5}\n").exit_code == 0
    options = ["--ema"] if kind == "mean" else []
    done = CliRunner().invoke(app, ["checkpoint", str(out / "run"), "--export", str(out / "exported"), *options])
    assert done.exit_code == 0, done.output
    assert "the base with its adapter (LORA) merged, under the base's own names" in done.stdout
    files = [{path.name: path.read_bytes() for path in (out / name).iterdir()} for name in ("merged", "exported")]
    assert files[0].keys() == files[1].keys()
    assert (files[0] == files[1]) == (kind != "mean")


@pytest.mark.thorough
def test_an_export_keeps_the_dtypes_of_the_base(base: Path) -> None:
    ranks.save_random("llama", base, dtype=torch.bfloat16, vocab_size=256)
    out = base.parent
    assert run(base, *saving(out, config_in(out))).exit_code == 0
    assert CliRunner().invoke(app, ["checkpoint", str(out / "run"), "--export", str(out / "exported")]).exit_code == 0
    assert_same(ranks.stored(out / "exported"), ranks.stored(out / "merged"))
    assert (out / "exported/config.json").read_bytes() == (out / "merged/config.json").read_bytes()


def refused_export(model: Any, directory: Path) -> str:
    with Engine(plan(model, Spec.load(ranks.spec_of()))) as engine:
        engine.save(directory / "run")
    done = CliRunner().invoke(app, ["checkpoint", str(directory / "run"), "--export", str(directory / "exported")])
    assert done.exit_code == 2, done.output
    assert not (directory / "exported").exists()
    return " ".join(done.output.split())


PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}


def second_adapter(model: Any) -> None:
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj"]))


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "change", "words"),
    [
        ({}, second_adapter, "the save has the adapters default, second, and an export merges one"),
        ({}, scaled, "the layers of peft were changed after they were made"),
        (PROMPT, lambda model: None, "resume the run with --save-adapters"),
    ],
    ids=["two", "scaled", "prompt"],
)
def test_an_export_that_would_be_another_model_is_refused(
    tmp_path: Path, settings: dict[str, Any], change: Callable[[Any], None], words: str
) -> None:
    model = ranks.save_random("llama", tmp_path / "base")
    chosen = {**(LORA if not settings else {"task_type": "CAUSAL_LM"}), **settings}
    wrapped = peft.get_peft_model(model, peft.get_peft_config(chosen))
    change(wrapped)
    assert words in refused_export(wrapped, tmp_path)


def test_an_export_of_a_base_that_is_none_of_transformers_is_refused(tmp_path: Path) -> None:
    from examples.gpt import GPT

    wrapped = peft.get_peft_model(GPT(ranks.VOCABULARY, 8, 16, 2, 2), peft.LoraConfig(r=2, target_modules=["up"]))
    ids = {"shape": [8], "dtype": "int64", "high": ranks.VOCABULARY}
    spec = ranks.spec_of(inputs={"input_ids": ids, "targets": {"like": "input_ids"}})
    with Engine(plan(wrapped, Spec.load(spec))) as engine:
        engine.save(tmp_path / "run")
    done = CliRunner().invoke(app, ["checkpoint", str(tmp_path / "run"), "--export", str(tmp_path / "exported")])
    assert done.exit_code == 2
    assert "a model that is none of transformers" in " ".join(done.output.split())


@pytest.mark.thorough
def test_saved_adapters_are_trained_further(base: Path) -> None:
    first, second = base.parent / "first", base.parent / "second"
    assert run(base, "--peft", str(config_in(base.parent)), "--save-adapters", str(first)).exit_code == 0
    assert run(base, "--peft", str(first), "--save-adapters", str(second)).exit_code == 0
    before, after = ((path / "adapter_model.safetensors").read_bytes() for path in (first, second))
    assert before != after
    assert json.loads((second / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "lora.json"),
        ("[]", "has no peft_type that this version of peft has"),
        ('{"peft_type": "LORRA"}', "has no peft_type that this version of peft has"),
        (json.dumps(LORA | {"rank": 4}), "rank"),
        (json.dumps(LORA | {"target_modules": ["query"]}), "Target modules {'query'} not found in the base model"),
        (json.dumps(LORA | {"r": 0}), "`r` should be a positive integer value"),
    ],
)
def test_a_config_that_is_wrong_is_one_error(base: Path, content: str, words: str) -> None:
    file = base.parent / "lora.json"
    file.write_text(content)
    done = run(base, "--peft", str(file), command="plan")
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--save-adapters", "adapters"), "the planned model has no adapters of peft"),
        (("--save-merged", "merged"), "the planned model has no adapters of peft"),
        (("--peft", "nowhere.json"), "nowhere.json"),
    ],
)
def test_options_that_do_not_go_together_are_one_error(
    base: Path, words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    done = run(base, *words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


@pytest.mark.thorough
def test_an_adapter_of_another_base_is_one_error_before_a_rank_starts(base: Path) -> None:
    saved = base.parent / "adapters"
    assert run(base, "--peft", str(config_in(base.parent)), "--save-adapters", str(saved)).exit_code == 0
    config = json.loads((saved / "adapter_config.json").read_text())
    (saved / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "someone/else"}))
    for command in ("train", "evaluate"):
        done = run(base, "--peft", str(saved), command=command)
        assert done.exit_code == 2
        assert "the adapter was trained on the base someone/else" in " ".join(done.output.split())


def perplexity(model: Path, base: Path, *words: str) -> float:
    spec, text = base.parent / "spec.yaml", base.parent / "text.txt"
    options = ["--data", str(text), "--format", "json", *words]
    done = CliRunner().invoke(app, ["evaluate", f"hf:{model}", str(spec), *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["perplexity"]


@pytest.mark.thorough
def test_a_save_saved_adapters_and_their_merge_have_one_perplexity(base: Path) -> None:
    out, config = base.parent, str(config_in(base.parent))
    spec = SPEC + "optimizer: {lr: 0.05}\n"
    assert run(base, *saving(out, Path(config)), "--save-adapters", str(out / "adapters"), spec=spec).exit_code == 0
    found = perplexity(base, base, "--peft", config, "--load", str(out / "run"))
    assert perplexity(base, base, "--peft", str(out / "adapters")) == found
    assert perplexity(out / "merged", base) == pytest.approx(found, rel=1e-5)
    assert perplexity(base, base, "--peft", config) == perplexity(base, base)  # a new adapter adds nothing
    assert perplexity(base, base) != pytest.approx(found, rel=1e-3)


@pytest.mark.thorough
@pytest.mark.slow
def test_memory_and_search_count_what_is_trained(base: Path) -> None:
    words = ("--peft", str(config_in(base.parent)), "--format", "json")
    measured = run(base, *words, command="memory")
    assert measured.exit_code == 0, measured.output
    bytes_of = {row["category"]: row["measured"] for row in json.loads(measured.stdout)["rows"]}
    assert 0 < bytes_of["gradients"] < bytes_of["parameters"] / 2
    spec = SPEC.replace("{}", "auto", 1) + "cluster: dgx-h100\ndevices: 2\n"
    searched = [run(base, *more, command="search", spec=spec) for more in (words, words[2:])]
    assert searched[0].exit_code == 0, searched[0].output
    adapted, whole = (json.loads(done.stdout) for done in searched)
    assert adapted != whole


def test_peft_of_a_comparison_needs_its_model(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(SPEC)
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    done = CliRunner().invoke(app, ["diff", *files, "--peft", str(config_in(tmp_path))])
    assert done.exit_code == 2
    assert "--peft wraps the model of --model" in " ".join(done.output.split())


@pytest.mark.thorough
def test_parameters_of_the_base_stay_as_they_were(base: Path) -> None:
    transformers = pytest.importorskip("transformers")
    before = {name: value.clone() for name, value in torch_weights(transformers, base).items()}
    out = base.parent / "merged"
    ia3 = json.dumps(
        {"peft_type": "IA3", "task_type": "CAUSAL_LM", "target_modules": ["k_proj"], "feedforward_modules": []}
    )
    (base.parent / "ia3.json").write_text(ia3)
    assert run(base, "--peft", str(base.parent / "ia3.json"), "--save-merged", str(out)).exit_code == 0
    after = torch_weights(transformers, out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "k_proj" in name}


def torch_weights(transformers: Any, directory: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.thorough
def test_a_base_is_loaded_below_adapters_that_stay(base: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(base))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**{k: v for k, v in LORA.items() if k != "peft_type"}))
    adapters = {name: value.detach().clone() for name, value in wrapped.named_parameters() if value.requires_grad}
    with Engine(plan(wrapped, Spec.load(ranks.spec_of()))) as engine:
        engine.load_pretrained(base)
        found = engine.gather_parameters()
    assert all(torch.equal(found[name], value) for name, value in adapters.items())
    stored = torch_weights(transformers, base)
    layer = "model.layers.1.mlp.down_proj"
    assert torch.equal(found[f"base_model.model.{layer}.base_layer.weight"], stored[f"{layer}.weight"])
    assert torch.equal(found["base_model.model.lm_head.weight"], stored["lm_head.weight"])


@pytest.mark.thorough
def test_a_saved_plan_of_an_adapted_model_says_that_it_has_no_modules_of_peft(base: Path) -> None:
    config, saved = str(config_in(base.parent)), base.parent / "plan.pt"
    made = run(base, "--peft", config, "--format", "pt", "-o", str(saved), command="plan")
    assert made.exit_code == 0, made.output
    done = run(base, "--peft", config, "--plan", str(saved))
    assert done.exit_code == 2
    assert "a saved plan does not hold the modules of peft" in " ".join(done.output.split())
    with Engine(Plan.load(saved)) as engine, pytest.raises(PlanError, match="no adapters of peft, or the plan was"):
        engine.save_adapters(base.parent / "adapters")


@pytest.mark.thorough
def test_the_adapters_of_the_best_step_stay(base: Path) -> None:
    words = (
        "--peft",
        str(config_in(base.parent)),
        "--validate-every",
        "1",
        "--keep-best",
        "--save",
        str(base.parent / "run"),
    )
    done = run(base, *words, spec=SPEC + "data: {validation: 0.2}\noptimizer: {lr: 1.0e-2}\n")
    assert done.exit_code == 0, done.output
    kept = base.parent / "run" / "best_adapters"
    assert sorted(path.name for path in kept.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    (best,) = (base.parent / "run" / "best").glob("step-*")
    model = load_model(f"hf:{base} --peft {kept}", values_later=True)
    with Engine(plan(model, Spec.load(ranks.spec_of()))) as engine:
        engine.load_pretrained(base)
        engine.load_adapters(kept)
        found = engine.gather_parameters()
    with Engine(plan(model, Spec.load(ranks.spec_of()))) as engine:
        engine.load(best)
        assert_same(found, engine.gather_parameters())
