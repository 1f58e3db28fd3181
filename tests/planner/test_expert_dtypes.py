"""The decisions about experts of every family, in each dtype: a router's float32 within bfloat16 changes none."""

from itertools import cycle

import pytest
import torch
from torch import Tensor

from passes.moe import exchange
from planner import Plan
from planner.exchanges.collectives import exchanges_of
from tests.models import experts, hugging_face, selected_rows
from tests.models.hugging_face import MOE
from tests.numeric.test_expert_layouts import batch_of
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

HALF = cycle(("bfloat16", "float16"))  # one of the two, as both are half precision to a decision
CASES = [(name, dtype) for name in MOE for dtype in ("float32", next(HALF))]
TOKENS = "tokens sorted by expert; tokens, once to a rank: dispatch_tokens, dispatch {weights}, combine"
TOP_1 = "the rows that chose it; rows: dispatch, dispatch, give_back"
OTHERWISE = {"llama4": TOP_1}  # from TOKENS
BEHIND_A_DENSE_LAYER = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "deepseek_v2", "exaone_moe")
# Their routers weigh in float32 and cast no weight: in half precision these travel as {weights}.
IN_FLOAT32 = (
    *BEHIND_A_DENSE_LAYER,
    "mixtral",
    "mixtral with its loss",
    "minimax",
    "minimax_m2",
    "solar_open",
)


def decisions(name: str, dtype: str) -> tuple[int, str]:
    """How many layers send, and how they do: dispatch, what travels, and each exchange, with the dtype of floats
    that do not travel in the dtype of the model."""
    batch = hugging_face.batch("mixtral")
    given = {"parameters": dtype} | ({"loss_scale": "dynamic"} if dtype == "float16" else {})
    made = plan_again(hugging_face.made(MOE[name]), spec_of(batch, {"dp": 2, "ep": 2}, precision=given))
    assert {row.num_experts for row in made.experts} == {4}
    (said,) = {f"{row.how}; {row.sends}" for row in made.experts}
    sent = _exchanges(made, dtype)
    each, rest = divmod(len(sent), len(made.experts))
    assert (rest, sent) == (0, sent[:each] * len(made.experts))
    return len(made.experts), f"{said}: {', '.join(sent[:each])}"


def _exchanges(made: Plan, dtype: str) -> list[str]:
    nodes = [n for n in exchanges_of(made.decisions) if n.target is not exchange.meet]
    dtypes = [str(n.meta["val"].dtype).removeprefix("torch.") for n in nodes]
    return [n.target.__name__ + (f" {own}" if own != dtype else "") for n, own in zip(nodes, dtypes, strict=True)]


@pytest.mark.thorough
@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_family_decides_alike_in_each_dtype(name: str, dtype: str) -> None:
    is_wide = name in IN_FLOAT32 and dtype != "float32"
    words = OTHERWISE.get(name, TOKENS).replace(" {weights}", " float32" if is_wide else "")
    assert decisions(name, dtype) == (1 if name in BEHIND_A_DENSE_LAYER else 2, words)


def residual(layer: experts.Layer, x: Tensor, probs: Tensor, chosen: Tensor) -> Tensor:
    """Beside an expert's result stand its own rows and a constant."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(layer.experts):
        token, choice = torch.where(chosen == e)
        y = x[token] + expert(x[token]) + torch.full((token.shape[0], x.shape[-1]), 0.5, dtype=x.dtype)
        out.index_add_(0, token, y * probs[token, choice, None])
    return out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", [residual, *selected_rows.WAYS], ids=lambda w: w.__name__)
def test_a_loop_over_selected_rows_is_distributed_alike_in_half_precision(way: experts.Way) -> None:
    """In float16 the capture hides unselected rows wherever they are read, and not just at the end. A mask of one of a
    token's choices is not True at all rows of an expert, so each expert has its own tokens there.
    """
    said: set[tuple[str, str]] = set()
    for dtype in ("bfloat16", "float16"):
        given = {"parameters": dtype} | ({"loss_scale": "dynamic"} if dtype == "float16" else {})
        model = experts.Net(selected_rows.Selecting(way))
        made = plan_again(model, spec_of(batch_of(4), {"dp": 2, "ep": 2}, precision=given))
        said |= {(row.how, row.sends) for row in made.experts}
    if way in (selected_rows.columns, selected_rows.of_batches):
        assert {sends for _, sends in said} == {"rows", "tokens, once to a rank"}
    else:
        assert len(said) == 1
