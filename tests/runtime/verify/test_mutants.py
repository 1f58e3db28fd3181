"""Every exchange that lowering inserts is needed: without any single one, some gradient or the loss is wrong."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.gpt import GPT
from passes.base import RankProgram
from passes.errors import PlanError
from passes.ops import collectives, experts, tokens
from passes.ops.axis import AxisHandle
from planner import plan
from planner.spec.spec import Spec
from runtime.audit.own_module import Tolerance
from runtime.distributed.launch import launch
from runtime.engine.engine import Engine
from runtime.verify.comparison import compare_gradients, compare_value
from runtime.verify.mutants import num_collectives, without_collective
from runtime.verify.reference import OneProcess
from tests.models.routed import VOCABULARY, Experts, Routed, loop, stacks
from tests.tools.limits import HANG_SECONDS
from tests.tools.planted import experts as planted
from tests.tools.simulated_mesh import one_process, run_mesh

SPEC = {
    "mesh": {"tp": 2},
    "batch": {"global": 4, "micro": 2},
    "inputs": {"input_ids": {"shape": [8], "dtype": "int64", "high": 37}, "targets": {"like": "input_ids"}},
}


def build() -> GPT:
    torch.manual_seed(0)
    model = GPT(vocabulary=37, length=8, width=16, num_layers=2, num_heads=2).double()
    with torch.no_grad():
        for parameter in model.parameters():  # biases away from zero, so that each of them is seen
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(37, (4, 8), generator=generator) for name in ("input_ids", "targets")}


def run_each_mutant(mesh: dict) -> list[tuple[str, float, dict]]:
    """("whole" or the number taken out, loss, gradients), on rank 0 with tensors."""
    model = build()
    decided = plan(model, {**SPEC, "mesh": mesh})
    found = []
    for number in (None, *range(num_collectives(decided))):
        rank = int(os.environ["RANK"])
        program = None if number is None else without_collective(decided, rank, number)
        with Engine(decided, program=program, timeout_seconds=HANG_SECONDS) as engine:
            found.append((str(number), engine.forward_backward(batch()), engine.gather_gradients()))
    return found


@pytest.mark.thorough
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "at_least"), [({"tp": 2}, 10), ({"tp": 2, "pp": 2}, 10), ({"cp": 2}, 2), ({"cp": 2, "pp": 2}, 2)], ids=str
)
def test_without_any_single_exchange_the_result_is_wrong(mesh, at_least):
    found = launch(run_each_mutant, 2 * mesh.get("pp", 1), mesh, timeout_seconds=HANG_SECONDS)[0]
    assert len(found) > at_least
    one = OneProcess(build(), Spec.load(SPEC))
    loss = one.forward_backward(batch())
    gradients = {name: p.grad for name, p in one.model.named_parameters(remove_duplicate=False)}
    allowed = Tolerance.of(torch.float64, lr=1e-3)
    verdicts = {}
    for number, mutant_loss, mutant_gradients in found:
        rows = [compare_value("loss", mutant_loss, loss, allowed.loss, 1)]
        rows += compare_gradients(mutant_gradients, gradients, allowed)
        verdicts[number] = all(row.passed for row in rows)
    assert verdicts.pop("None")
    assert [number for number, equal in verdicts.items() if equal] == []


@pytest.mark.thorough
def test_a_number_beyond_the_last_is_refused():
    decided = plan(build(), SPEC)
    last = num_collectives(decided)
    with pytest.raises(PlanError, match=f"there is no collective {last} to remove") as caught:
        without_collective(decided, 0, last)
    assert caught.value.fix == f"choose 0 to {last - 1}"


TP = {"tp": 2, "dp": 2, "ep": 2, "etp": 1}
ETP = {"dp": 4, "etp": 2, "ep": 2}
DP = {"dp": 4, "ep": 2}  # over tp each rank sends rows that lie by expert beside those of the others already
Change = Callable[[pytest.MonkeyPatch], object]


def make(way: Experts, top_k: int = 2) -> Routed:
    torch.manual_seed(0)
    return Routed(way, torch.randn(VOCABULARY, 4) * 2, top_k).double()


def is_equal(
    way: Experts, mesh: dict[str, int], top_k: int = 2, change: Callable[[RankProgram], None] = lambda _: None
) -> bool:
    """Loss and every gradient, against one process. With one choice rows go one by one, with two tokens once."""
    rows = 2 * mesh["dp"]
    drawn = torch.randint(VOCABULARY, (2, rows, 5), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": drawn[0], "labels": drawn[1]}
    ran, model = run_mesh(lambda: make(way, top_k), batch, mesh, change=change), make(way, top_k)
    truth = one_process(model, model(**batch))
    return abs(float(ran.loss - truth.loss)) < 1e-10 and max(ran.apart(truth).values()) < 1e-8


def _stay(phase: str, over: str) -> Change:
    """Rows (or their gradients) of a phase do not leave the rank, over one axis."""

    def change(patch: pytest.MonkeyPatch) -> None:
        for name in ("_send", "_return"):
            patch.setattr(experts, name, planted.rows_stay(phase, (over,))(getattr(experts, name)))

    return change


def _unsummed(patch: pytest.MonkeyPatch) -> None:
    """gather_in over etp gives this rank's own part, where the sum of all is due."""
    patch.setattr(experts, "_sum_of_parts", planted.one_part)


def _unsorted(patch: pytest.MonkeyPatch) -> None:
    """give_back sends rows by expert, where those of each sender are to lie together."""

    def give_back(rows: Tensor, splits: experts.Splits, axis: AxisHandle) -> Tensor:
        return experts.moved(rows, splits, axis, experts._return, experts._send)

    patch.setattr(experts, "give_back", give_back)


def _unsorted_there(patch: pytest.MonkeyPatch) -> None:
    """dispatch leaves rows by sender, where the experts expect their own together."""

    def dispatch(rows: Tensor, splits: experts.Splits, axis: AxisHandle) -> Tensor:
        return experts.moved(rows, splits, axis, experts._send, experts._return)

    patch.setattr(experts, "dispatch", dispatch)


def _tokens_stay(phase: str) -> Change:
    """Tokens (or their gradients) do not leave the rank."""
    return lambda patch: patch.setattr(tokens, "exchanged", planted.tokens_stay(phase)(tokens.exchanged))


def _last_alone(patch: pytest.MonkeyPatch) -> None:
    """A token gets the result of one of its rows, where the sum of all is due."""
    patch.setattr(tokens, "_summed", planted.one_of_the_rows)


def _places_of_senders(patch: pytest.MonkeyPatch) -> None:
    """Rows read the tokens of the first sender, where those of their own are due."""
    places = tokens.Leaving.places

    def of_first(self: tokens.Leaving, splits: experts.Splits, figures: experts.Figures, axis: AxisHandle) -> Tensor:
        return places(self, splits, replace(figures, came=torch.zeros_like(figures.came)), axis)

    patch.setattr(tokens.Leaving, "places", of_first)


MUTANTS: dict[str, tuple[dict[str, int], int, Change]] = {
    "rows stay where they are": (TP, 1, _stay("forward", "ep")),
    "gradients are not sent back": (TP, 1, _stay("backward", "ep")),
    "over etp, rows stay where they are": (ETP, 1, _stay("forward", "etp")),
    "over etp, gradients are not sent back": (ETP, 1, _stay("backward", "etp")),
    "parts over etp are not added up": (ETP, 1, _unsummed),
    "rows are given back in a wrong order": (DP, 1, _unsorted),
    "rows reach experts in a wrong order": (DP, 1, _unsorted_there),
    "tokens stay where they are": (DP, 2, _tokens_stay("forward")),
    "gradients of tokens are not sent back": (DP, 2, _tokens_stay("backward")),
    "one result of a token counts": (DP, 2, _last_alone),
    "rows read tokens of another sender": (DP, 2, _places_of_senders),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", [loop, stacks], ids=lambda w: w.__name__)
@pytest.mark.parametrize(("mesh", "top_k"), {(str(mesh), k): (mesh, k) for mesh, k, _ in MUTANTS.values()}.values())
def test_with_nothing_changed_it_equals_one_process(way: Experts, mesh: dict[str, int], top_k: int) -> None:
    assert is_equal(way, mesh, top_k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("way", [loop, stacks], ids=lambda w: w.__name__)
def test_an_exchange_of_rows_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, way: Experts, name: str) -> None:
    mesh, top_k, change = MUTANTS[name]
    change(monkeypatch)
    assert not is_equal(way, mesh, top_k)


def _through(x: Tensor, axis: AxisHandle) -> Tensor:
    return x.view_as(x)


def sums_over_tp(program: RankProgram) -> list[Any]:
    targets = (collectives.f, collectives.g, collectives.g_f)
    return [node for node in program.stages[0].module.graph.nodes if node.target in targets]


@pytest.mark.thorough
@pytest.mark.parametrize("way", [loop, stacks], ids=lambda w: w.__name__)
def test_any_sum_over_tp_left_out_is_seen(way: Experts) -> None:
    """Among them those of what the router and the tokens get back from rows that each tp rank sent a part of."""
    found = []

    def without(number: int) -> Callable[[RankProgram], None]:
        def change(program: RankProgram) -> None:
            nodes = sums_over_tp(program)
            found.append(len(nodes))
            if number < len(nodes):
                nodes[number].target = _through
                nodes[number].kwargs = {}
                nodes[number].args = nodes[number].args[:2]
                program.stages[0].module.recompile()

        return change

    assert is_equal(way, TP, change=without(1000))
    assert min(found) == max(found) >= 3
    assert [number for number in range(found[0]) if is_equal(way, TP, change=without(number))] == []
