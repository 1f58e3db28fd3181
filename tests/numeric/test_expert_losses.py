"""Losses of routers: a load-balancing loss is a product of means over the batch, a z-loss a mean over tokens.

With one microbatch for each dp rank both are those of one process on the global batch; ranks are threads.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner import plan
from planner.capture.python.state import PythonState
from tests.models import experts, hugging_face
from tests.models.hugging_face import EXPERTS, Member
from tests.numeric.test_expert_layouts import FOLDINGS, batch_of, check, family
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

LAYOUTS = {"dp2": {"dp": 2}, "dp4": {"dp": 4}, **{n: FOLDINGS[n] for n in ("ep2·dp2", "tp2·dp2·ep2, etp 1")}}


class Balanced(nn.Module):
    """Experts whose loss has a load-balancing term and a z-loss beside the cross-entropy."""

    def __init__(self, counting: str) -> None:
        super().__init__()
        self.counting = counting
        self.net = experts.Net(experts.Layer(experts.masks))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss = self.net(input_ids, labels)
        layer = self.net.layer
        scores = layer.gate(self.net.norm(self.net.tokens(input_ids))).flatten(0, 1)
        probs = scores.softmax(-1)
        chosen = probs.topk(layer.top_k, -1).indices
        if self.counting == "one-hot":
            share = F.one_hot(chosen, layer.num_experts).to(probs.dtype).sum(1).mean(0)
        else:
            share = torch.histc(chosen.flatten().to(probs.dtype), layer.num_experts, 0, layer.num_experts - 1)
            share = share / chosen.shape[0]
        balance = layer.num_experts * (share * probs.mean(0)).sum()
        return loss + 0.1 * balance + 0.01 * scores.logsumexp(-1).square().mean()


def made(counting: str) -> nn.Module:
    torch.manual_seed(2)
    return Balanced(counting).double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counting", ["one-hot", "histogram"])
def test_losses_of_a_router_are_those_of_the_global_batch(counting, layout):
    check(lambda: made(counting), LAYOUTS[layout])


@pytest.mark.thorough
def test_a_family_with_its_loss():
    with_loss = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    member = Member("MixtralForCausalLM", "MixtralConfig", EXPERTS | with_loss)
    batch = {key: torch.cat([x, x.roll(1, 1)])[:4] for key, x in hugging_face.batch("mixtral").items()}
    check(lambda: family(member), FOLDINGS["ep2·dp2"], 1e-5, batch=batch)


@pytest.mark.thorough
def test_statistics_of_each_microbatch_are_reported():
    spec = spec_of(batch_of(8), {"dp": 2})
    spec["batch"] = {"global": 8, "micro": 2, "statistics": "microbatch"}
    warned = [row for row in plan_again(made("one-hot"), spec).diagnostics if row.level == "warning"]
    assert any("averaged over microbatches" in row.what and "batch.statistics" in row.fix for row in warned)


def test_forwards_that_run_twice_are_reported():
    spec = spec_of(batch_of(8), {"dp": 2})
    spec["batch"] = {"global": 8, "micro": 2}
    made_plan = plan_again(made("one-hot"), spec)
    assert [row.level for row in made_plan.diagnostics if "run twice" in row.what] == ["info"]
    assert not any("averaged over microbatches" in row.what for row in made_plan.diagnostics)


class Hooking(nn.Module):
    """Its forward installs a hook when it runs first, as models do that record what their layers make."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head, self.seen = nn.Linear(8, 8), nn.Linear(8, 8), []

    def forward(self, x: Tensor) -> Tensor:
        if not getattr(self, "is_hooked", False):
            self.inner.register_forward_hook(lambda *_: self.seen.append(1))
            self.is_hooked = True
        self.seen.clear()
        return self.head(self.inner(x)).mean() * len(self.seen)


def test_hooks_that_a_forward_installs_are_gone_with_what_says_that_they_are_there():
    model = Hooking()
    before = PythonState(model)
    decided = plan(  # which keeps nothing in a global, as plan_again does
        model, {"mesh": {}, "batch": {"global": 4, "micro": 2}, "inputs": {"x": {"shape": [8], "dtype": "float32"}}}
    )
    assert before.changes() == []
    assert not model.inner._forward_hooks
    assert decided.mesh.world_size == 1
    model(torch.ones(2, 8))
    assert len(model.seen) == 1
