"""Parameters on meta keep what else a module is; buffers that went to meta come back, or one error names them."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from planner import PlanError, meta_parameters
from planner.capture.model.meta_init import buffer_value


class Table(nn.Module):
    """A buffer that depends on the size, as rotary frequencies do."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.size = size
        self.scale = nn.Parameter(torch.ones(size))
        self.register_buffer("steps", torch.arange(size) * 2, persistent=False)


class Offers(nn.Module):
    """Initialises any module of its tree, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Table(), nn.Linear(2, 2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.steps.copy_(torch.arange(module.size) * 2)
            module.scale.fill_(7.0)


class OffersHalf(Offers):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.steps[:2] = 5


def test_meta_parameters_keeps_ties_flags_and_buffers():
    with meta_parameters():
        model = nn.Module()
        model.a, model.b = nn.Linear(4, 4), nn.BatchNorm1d(4)
        model.a.bias = nn.Parameter(torch.ones(4), requires_grad=False)
        model.tied = model.a.weight
    assert model.tied is model.a.weight
    assert model.tied.is_meta
    assert not model.a.bias.requires_grad
    assert torch.equal(model.b.running_var, torch.ones(4))
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_factory_may_name_its_dtype_by_a_type_of_python():
    with meta_parameters():
        made = [torch.ones(2, 2, dtype=kind) for kind in (bool, int, float)]  # pyright: ignore
    assert [x.dtype for x in made] == [torch.bool, torch.int64, torch.float64]


def test_a_real_buffer_is_given_as_it_is():
    assert buffer_value(Offers(), "inner.0.steps").tolist() == [0, 2, 4, 6]


def test_a_buffer_on_meta_is_made_by_the_models_own_initialiser():
    with torch.device("meta"):
        model = Offers()
    assert buffer_value(model, "inner.0.steps").tolist() == [0, 2, 4, 6]
    assert model.inner[0].steps.is_meta
    assert model.inner[0].scale.is_meta


def test_making_a_buffer_leaves_real_parameters_of_its_module_alone():
    model = Offers()
    model.inner[0].steps = model.inner[0].steps.to("meta")
    buffer_value(model, "inner.0.steps")
    assert torch.equal(model.inner[0].scale, torch.ones(4))


@pytest.mark.parametrize("kind", [lambda: nn.Sequential(Table()), OffersHalf], ids=["no initialiser", "half written"])
def test_a_buffer_that_nothing_makes_whole_is_named_with_the_way_out(kind):
    with torch.device("meta"):
        model = kind()
    name = next(name for name, _ in model.named_buffers())
    with pytest.raises(PlanError, match=f"buffer {name} has no values") as caught:
        buffer_value(model, name)
    assert "meshwright.meta_parameters()" in caught.value.fix


CONFIGS = {
    "GPTJForCausalLM": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8, "rotary_dim": 4},
    "LlamaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "BertForMaskedLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
    "Gemma3ForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_buffer_of_a_hugging_face_model_on_meta_comes_back(name):
    transformers = pytest.importorskip("transformers")
    config = (
        getattr(transformers, name).config_class(**CONFIGS[name], vocab_size=32)
        if "GPTJ" not in name
        else (transformers.GPTJConfig(**CONFIGS[name]))
    )
    real = getattr(transformers, name)(config)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    buffers = dict(real.named_buffers())
    assert buffers
    for fqn, value in buffers.items():
        assert torch.equal(buffer_value(model, fqn), value), fqn


class Holed(nn.Module):
    """A large weight that is written and goes to meta, before small memory that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(25_000))
        self.register_buffer("bias", torch.ones(256))


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux has it")
def test_memory_that_constructors_wrote_and_freed_goes_back_to_the_system():
    with meta_parameters():
        Holed()  # from here on the C library keeps blocks of that size
    before = resident()
    with meta_parameters():
        built = [Holed() for _ in range(1000)]  # 0.1 MB each
    assert resident() - before < 32 << 20
    assert all(layer.weight.is_meta for layer in built)


def resident() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10
