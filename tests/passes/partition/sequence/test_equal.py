"""The program of a cp rank, run for all ranks: loss and every gradient are those of the whole program."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from passes.moe.find import find_experts
from passes.partition.loss.shares import LossTerms
from passes.partition.sequence.cut import cut_sequence
from passes.program.ops.aten import aten
from passes.program.program import Program, copied
from planner.captured import prepare
from planner.spec.spec import Spec
from tests.models import families, own, sequences
from tests.planner.test_documents import family
from tests.tools.captures import captured_again
from tests.tools.sequence_ranks import compared
from tests.tools.simulated_mesh import run_mesh
from tests.tools.specs import inputs_of

IN_FLOAT64 = ["bert", "t5", "roberta", "opt"]
IN_FLOAT32 = [
    "gpt2",
    "gpt_neox",
    "llama",
    "qwen3",
    "gemma2",
    "bloom",
    "falcon-alibi",
    "mistral",
    "llama-one-key-head",
    "phi3",
]
SCANS = ["mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"]
MODELS = ["gpt", "einsum", "relative-bias", "memory", "parallel", "experts", "torch-encoder", "penalty-loss", "z-loss"]


def program_of(model: nn.Module, batch: Mapping[str, Tensor], microbatches: int) -> tuple[Program, LossTerms]:
    """What the recipe has before it cuts anything, of a batch that is one of so many microbatches."""
    rows = len(next(iter(batch.values())))
    inputs = inputs_of(batch)
    spec = Spec.load({"mesh": {}, "batch": {"global": rows * microbatches, "micro": rows}, "inputs": inputs})
    made = prepare(captured_again(model, spec), spec)
    return made.program, made.terms


def worst_of(entry: families.Entry, *cp: int, microbatches: int = 2) -> float:
    """The largest difference, of any of these cp."""
    batch = {name: value[1:3] for name, value in entry.batch(4, 5).items()}
    program, terms = program_of(entry.model, batch, microbatches)
    return max(max(compared(copied(program), terms, entry.model, batch, size).values()) for size in cp)


def reading(model: nn.Module) -> families.Entry:
    """A model of tests.models.sequences with its inputs."""
    given = ((sequences.LENGTH,), torch.int64, sequences.VOCABULARY)
    return families.Entry(model, {"input_ids": given, "labels": given}, ("labels",))


def lengthened(entry: families.Entry, length: int) -> families.Entry:
    entry.inputs = {n: ((length, *s[1:]) if s else s, *rest) for n, (s, *rest) in entry.inputs.items()}  # pyright: ignore
    return entry


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_FLOAT64 + IN_FLOAT32)
def test_a_family_is_equal(name: str) -> None:
    entry = lengthened(families.build(name), 16)
    assert worst_of(entry, 2, 4) < (1e-10 if name in IN_FLOAT64 else 2e-6)


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SCANS)
def test_a_family_with_scans_of_4_chunks_is_equal(kind: str) -> None:
    entry = families.Entry(family(kind).double().eval(), families.tokens(97, length=32), ("labels",))
    assert worst_of(entry, 2) < 2e-6


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", SCANS)
def test_a_family_with_scans_over_cp_and_tp_is_equal(kind: str) -> None:
    def make() -> nn.Module:
        return family(kind).eval()  # grouped products have no float64

    batch, model = families.Entry(make(), families.tokens(97, length=32), ("labels",)).batch(2, 5), make()
    ran, loss = run_mesh(make, batch, {"cp": 2, "tp": 2}), model(**batch).loss
    loss.backward()
    torch.testing.assert_close(ran.loss, loss.detach(), rtol=2e-6, atol=0.0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ran.gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_our_own_is_equal(name: str) -> None:
    assert name in own.MODELS
    assert worst_of(families.build(name), 3) < 1e-10


@pytest.mark.thorough
def test_a_pooled_sequence_of_a_family_is_equal() -> None:
    assert worst_of(families.build("bert-classes"), 2) < 1e-10


@pytest.mark.thorough
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("name", sequences.LOSSES)
def test_a_loss_that_reads_its_sequence_is_equal(name: str, microbatches: int) -> None:
    assert worst_of(reading(sequences.reader(name)), 4, microbatches=microbatches) < 1e-10


def _best_half(x: Tensor) -> Tensor:
    """A router's best tokens are changed, and added to where they stood."""
    weight, places = x.sum(-1).topk(x.shape[1] // 2, 1)
    places = places[..., None].expand(-1, -1, x.shape[-1])
    return x.scatter_add(1, places, x.gather(1, places).tanh() * weight.sigmoid()[..., None])


class Recurrent(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x + super().forward(x)[0]


OF_ALL_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "sorted": lambda x: x.sort(1).values,
    "largest so far": lambda x: x.cummax(1).values,
    "in three parts": lambda x: torch.cat(x.chunk(3, 1)[::-1], 1),
    "token by token": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "the best half": _best_half,
    "a recurrence": Recurrent(16, 16, batch_first=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", OF_ALL_TOKENS)
def test_an_op_of_all_tokens_with_several_results_is_equal(how: str) -> None:
    model = sequences.Reader(sequences.LOSSES["shifted"], OF_ALL_TOKENS[how]).double()
    assert worst_of(reading(model), 2, 4) < 1e-10


class Frozen(nn.Module):
    """Ids reach the first block through a frozen table, to which trained positions are added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(40, 12), nn.Embedding(16, 12)
        self.tokens.weight.requires_grad_(False)
        self.norm, self.up, self.head = nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 40)
        self.double()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = x + torch.tanh(self.up(self.norm(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_a_sequence_of_frozen_embeddings_is_cut() -> None:
    shape = ((16,), torch.int64, 40)
    entry = families.Entry(Frozen(), {"input_ids": shape, "labels": shape}, ("labels",))
    assert worst_of(entry, 2, 4) < 1e-10


@pytest.mark.thorough
def test_layers_without_a_gradient_run_on_the_tokens_of_a_rank_alone() -> None:
    entry = lengthened(families.build("llama"), 16)
    for module in (entry.model.get_submodule(f"model.{name}") for name in ("embed_tokens", "layers.0", "layers.1")):
        module.requires_grad_(False)
    assert worst_of(entry, 2, 4) < 2e-6
    batch = {name: value[1:3] for name, value in entry.batch(4, 5).items()}
    program, _ = program_of(entry.model, batch, 2)
    products = len(program.graph.graph.find_nodes(op="call_function", target=aten.linear.default))
    cut_sequence(program, 2, find_experts(program))
    assert len(program.graph.graph.find_nodes(op="call_function", target=aten.linear.default)) == products
