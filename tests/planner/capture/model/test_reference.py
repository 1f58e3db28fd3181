"""MODEL of the command line: what it can name, and one clear error for each way to get it wrong."""

import json
import sys

import pytest
import torch
from torch import nn

from passes.errors import PlanError
from planner.capture.model.reference import load_model, pretrained_directory

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "num_hidden_layers": 1,
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    def write(content, name="config.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


@pytest.fixture
def source(tmp_path, monkeypatch, request):
    """A user's file of a name of its own, taken off the import path again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"users_{abs(hash(request.node.nodeid))}"

    def write(text):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    yield write
    sys.modules.pop(name, None)


def test_file_reference_builds_the_model(source):
    path = source("from torch import nn\ndef build():\n    return nn.Linear(3, 4)\n")
    assert load_model(f"{path}:build").weight.shape == (4, 3)


def test_file_may_import_its_neighbours(source, tmp_path):
    (tmp_path / "neighbour_of_model.py").write_text("width = 5\n")
    path = source(
        "from neighbour_of_model import width\nfrom torch import nn\ndef build():\n    return nn.Linear(width, width)\n"
    )
    assert load_model(f"{path}:build").in_features == 5


def test_module_reference_builds_the_model():
    assert isinstance(load_model("torch.nn:Identity"), nn.Identity)


def test_hugging_face_config_stands_on_meta_with_real_buffers(config):
    model = load_model(f"hf:{config({**LLAMA, 'architectures': ['LlamaForCausalLM']})}")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {b.device.type for b in model.buffers()} == {"cpu"}


def test_hugging_face_head_follows_architectures(config):
    assert type(load_model(f"hf:{config(LLAMA)}")).__name__ == "LlamaForSequenceClassification"


def test_hugging_face_without_architectures_is_a_causal_language_model(config):
    assert type(load_model(f"hf:{config(GPT2)}")).__name__ == "GPT2LMHeadModel"


def test_hugging_face_directory_is_read_by_its_config(config):
    assert type(load_model(f"hf:{config(GPT2).parent}")).__name__ == "GPT2LMHeadModel"


def test_materialized_weights_follow_the_seed(config):
    first, again, other = (load_model(f"hf:{config(GPT2)}", materialize=True, seed=s) for s in (1, 1, 2))
    name = "transformer.wte.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_materialized_directory_has_its_own_weights(config, tmp_path):
    saved = load_model(f"hf:{config(GPT2)}", materialize=True, seed=7)
    saved.save_pretrained(tmp_path / "saved")
    model = load_model(f"hf:{tmp_path / 'saved'}", materialize=True, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))


def test_weights_of_a_model_are_those_beside_its_config(config, tmp_path):
    reference = f"hf:{config(GPT2).parent}"
    assert pretrained_directory(reference) is None
    assert pretrained_directory("torch.nn:Identity") is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert pretrained_directory(reference) == tmp_path
    assert pretrained_directory(f"{reference}/config.json") is None


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("gpt", "has an unknown form"),
        ("no_such_module:build", "module 'no_such_module' cannot be imported"),
        ("no_such_file.py:build", "no file no_such_file.py"),
        ("torch.nn:Lineer", "no 'Lineer' in torch.nn"),
        ("torch.nn:Linear", "failed when called without arguments"),
        ("torch:pi", "is a float, not a callable"),
        ("builtins:list", "returned a list, not an nn.Module"),
        (
            "hf:no_such_directory",
            "no directory no_such_directory; names on the Hugging Face Hub are not supported",
        ),
    ],
)
def test_bad_reference_gets_one_clear_error(reference, words):
    with pytest.raises(PlanError, match=words):
        load_model(reference)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "the config is damaged or truncated"),
        ("[]", "has no model_type"),
        ({"model_type": "no_such_type"}, "not a config that transformers"),
    ],
)
def test_bad_config_gets_one_clear_error(config, content, words):
    with pytest.raises(PlanError, match=words):
        load_model(f"hf:{config(content)}")


def test_failing_callable_names_the_users_line(source):
    path = source("def build():\n    width = 3\n    raise RuntimeError('too wide')\n")
    with pytest.raises(PlanError, match="RuntimeError: too wide") as caught:
        load_model(f"{path}:build")
    assert f"{path.name}:3" in str(caught.value)


def test_syntax_error_names_the_users_line(source):
    path = source("x = 1\ndef build(:\n")
    with pytest.raises(PlanError, match="SyntaxError") as caught:
        load_model(f"{path}:build")
    assert f"{path.name}:2" in str(caught.value)


def test_own_package_of_our_name_is_said(source, tmp_path):
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "blocks_of_mine.py").write_text("")
    path = source("import runtime.blocks_of_mine\n")
    with pytest.raises(
        PlanError, match="imports its own 'runtime', but meshwright's package of this name is loaded instead"
    ):
        load_model(f"{path}:build")


@pytest.mark.parametrize("draw", ["random.random()", "float(numpy.random.rand())", "torch.rand(()).item()"])
@pytest.mark.parametrize("place", ["in the constructor", "at the import"])
def test_every_generator_that_a_model_may_draw_from_is_seeded(source, draw, place):
    value = draw if place == "in the constructor" else "DRAWN"
    path = source(f"""
import random, numpy, torch
DRAWN = {draw}
def build():
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, {value})
    return model
""")
    first, again, other = (load_model(f"{path}:build", seed=seed).weight.item() for seed in (1, 1, 2))
    assert first == again != other


CODE = "import pathlib\npathlib.Path({mark!r}).write_text('ran')\n"


@pytest.mark.parametrize("kind", ["of_its_own", "llama"])
def test_code_beside_a_config_is_not_run_and_not_asked_about(config, kind, monkeypatch, capfd):
    """A type that transformers has is built by its own class; any other is refused."""
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked"))
    monkeypatch.setattr("socket.socket.connect", lambda *place: pytest.fail("looked into the network"))
    own = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "someone/elsewhere--code.Model"}
    content = {**LLAMA, "architectures": ["LlamaForCausalLM"], "model_type": kind, "auto_map": own}
    file = config(content)
    mark = file.parent / "mark"
    (file.parent / "code.py").write_text(CODE.format(mark=str(mark)))
    if kind == "llama":
        assert type(load_model(f"hf:{file.parent}")).__name__ == "LlamaForCausalLM"
    else:
        with pytest.raises(PlanError, match=r"lies beside the config .auto_map., which is not run"):
            load_model(f"hf:{file.parent}")
    assert not mark.exists()


def test_a_config_whose_numbers_are_absurd_is_one_error(config):
    from planner.capture.model import hugging_face

    for changed in ({"hidden_size": 10**18}, {"vocab_size": "many"}, {"hidden_size": [1]}):
        with pytest.raises(PlanError, match=r"cannot be built|not a config that transformers"):
            load_model(f"hf:{config({**LLAMA, 'architectures': ['LlamaForCausalLM'], **changed})}")
    for changed in ({"num_labels": 10**8}, {"num_hidden_layers": 10**9}, {"text_config": {"num_labels": 10**8}}):
        with pytest.raises(PlanError, match="is more than 500000"):
            load_model(f"hf:{config({**LLAMA, **changed})}")
    before, hugging_face._MOST_MODULES = hugging_face._MOST_MODULES, 100
    try:
        with pytest.raises(PlanError, match="more than 100 modules"):
            load_model(f"hf:{config({**LLAMA, 'architectures': ['LlamaForCausalLM'], 'num_hidden_layers': 100})}")
    finally:
        hugging_face._MOST_MODULES = before
