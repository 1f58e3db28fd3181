"""Every update rule trains as torch's optimizer does in one process, on every layout; it resumes on another one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from passes.errors import PlanError
from planner import plan
from planner.spec.update_rules import UPDATE_RULES
from runtime import Engine
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.laboratory import NUM_BATCHES, Case, session_lab
from tests.tools.limits import HANG_SECONDS
from tests.tools.training import Trained, spec_of, trained_alone, trained_on

STEPS = 4
RULES: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam", "lr": 1e-3, "weight_decay": 0.1, "betas": [0.8, 0.9], "eps": 1e-6},
    "sgd": {"name": "sgd", "lr": 0.1, "weight_decay": 0.01},
    "sgd, momentum": {"name": "sgd", "lr": 0.05, "weight_decay": 0.01, "momentum": 0.9},
    "sgd, nesterov": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0, "momentum": 0.8, "nesterov": True},
    "lion": {"name": "lion", "lr": 1e-4, "weight_decay": 0.3, "betas": [0.9, 0.99]},
    "schedule-free": {"name": "schedule_free_adamw", "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6},
    "adagrad": {"name": "adagrad", "lr": 1e-2, "weight_decay": 0.01, "eps": 1e-8},
    "rmsprop": {
        "name": "torch.optim:RMSprop",
        "lr": 1e-3,
        "weight_decay": 0.1,
        "options": {"alpha": 0.9, "momentum": 0.5, "centered": True},
    },
    "adamax": {"name": "torch.optim:Adamax", "lr": 1e-3, "weight_decay": 0.0, "options": {"betas": [0.8, 0.9]}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"mesh": {}},
    "tp2·dp2": {"mesh": {"tp": 2, "dp": 2}},
    "pp2·dp2, zero 0": {"mesh": {"pp": 2, "dp": 2}, "optimizer": {"zero": 0}},
    "cp2·dp2": {"mesh": {"cp": 2, "dp": 2}},
    "tp2, dynamic scale": {"mesh": {"tp": 2}, "precision": {"parameters": "float64", "loss_scale": "dynamic"}},
}


class Lion(torch.optim.Optimizer):
    """As its authors write it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.add_((m * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                m.copy_(m * b2 + p.grad * (1 - b2))


class ScheduleFree(torch.optim.Optimizer):
    """As its authors write it: y moves towards z, then each by the gradient at y; x is found from both."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for y in group["params"]:
                s = self.state[y]
                z, v = s.setdefault("z", y.clone()), s.setdefault("v", torch.zeros_like(y))
                s["k"] = s.get("k", 0) + 1
                s["weights"] = s.get("weights", 0.0) + lr**2
                ckp1 = lr**2 / s["weights"]
                v.mul_(b2).addcmul_(y.grad, y.grad, value=1 - b2)
                g = y.grad / ((v / (1 - b2 ** s["k"])).sqrt() + group["eps"]) + group["weight_decay"] * y
                y.lerp_(z, ckp1)
                y.add_(g, alpha=lr * (b1 * (1 - ckp1) - 1))
                z.sub_(g, alpha=lr)

    def means(self) -> list[Tensor]:
        group = self.param_groups[0]
        return [y.detach().lerp(self.state[y]["z"], 1 - 1 / group["betas"][0]) for y in group["params"]]


def of_torch(parameters: list[nn.Parameter], rule: dict[str, Any]) -> torch.optim.Optimizer:
    keys = {name: value for name, value in rule.items() if name not in ("name", "options")} | rule.get("options", {})
    if rule["name"].startswith("torch.optim:"):
        return getattr(torch.optim, rule["name"].partition(":")[2])(parameters, **keys)
    if rule["name"] in OWN:
        return OWN[rule["name"]](parameters, {"betas": [0.9, 0.95], **keys})
    made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}
    return made[rule["name"]](parameters, **keys)


OWN: dict[str, Any] = {"lion": Lion, "schedule_free_adamw": ScheduleFree}


def batches_of(entry: families.Entry, device: str = "cpu") -> list[dict[str, Tensor]]:
    return [{k: x.to(device) for k, x in entry.batch(8, step).items()} for step in range(STEPS)]


def alone(rule: dict[str, Any], device: str = "cpu") -> Trained:
    entry = families.build("gpt")
    update = of_torch(list(entry.model.to(device).parameters()), rule)
    return trained_alone(entry.model, entry.loss, batches_of(entry, device), update)


def ruled(entry: families.Entry, rule: dict[str, Any], **layout: Any) -> dict[str, Any]:
    """The spec of a rule; a layout's ``optimizer`` has keys beside those of the rule."""
    return spec_of(entry, **{**layout, "optimizer": rule | layout.get("optimizer", {})})


def both(host: Any, rule: dict[str, Any], layout: dict[str, Any]) -> Any:
    entry = families.build("gpt")
    decided = plan_again(entry.model, ruled(entry, rule, **layout))
    return trained_on(host, decided, batches_of(entry)), alone(rule), decided.memory[0].optimizer


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_trains_as_that_of_torch(rule: str, layout: str) -> None:
    found, truth, planned = session_lab().call(both, RULES[rule], LAYOUTS[layout])
    assert found.losses == pytest.approx(truth.losses, rel=1e-10)
    for fqn, value in found.parameters.items():
        apart = (value - truth.parameters[fqn]).abs()
        if rule == "lion" and fqn.endswith("qkv.bias"):  # that of keys has no gradient but rounding, which has a sign
            apart = apart.view(3, -1)[[0, 2]]
        assert apart.max() <= 1e-9, fqn
    assert found.measured["optimizer"] == planned


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_a_run_goes_on_from_a_save_of_its_rule(rule: str, tmp_path: Path) -> None:
    entry = families.build("gpt")
    made, batches = plan(entry.model, ruled(entry, RULES[rule], mesh={})), batches_of(entry)
    with Engine(made) as engine:
        for batch in batches[:2]:
            engine.train_step(batch)
        engine.save(tmp_path)
        losses = [engine.train_step(batch).loss for batch in batches[2:]]
        wanted = engine.gather_parameters()
    entry = families.build("gpt")
    with Engine(plan(entry.model, ruled(entry, RULES[rule], mesh={}, optimizer={"zero": 0}))) as engine:
        engine.load(tmp_path)
        # the norm that clips is summed in another order
        assert [engine.train_step(batch).loss for batch in batches[2:]] == pytest.approx(losses, rel=1e-15)
        found = engine.gather_parameters()
        assert max((value - wanted[name]).abs().max().item() for name, value in found.items()) <= 1e-15


WARMUP = 3


def averaged(plan: Any, batches: list[dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Of one rank: parameters after these batches, their means, and whether the former are back afterwards, bitwise."""
    with Engine(plan, timeout_seconds=HANG_SECONDS) as engine:
        for batch in batches:
            engine.train_step(batch)
        trained = engine.gather_parameters()
        with engine.averaged_weights():
            means = engine.gather_parameters()
        back = engine.gather_parameters()
        return trained, means, all(torch.equal(back[name], value) for name, value in trained.items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{}, {"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_a_schedule_free_rule_evaluates_the_mean_of_its_steps(mesh: dict[str, int]) -> None:
    rule = {**RULES["schedule-free"], "schedule": {"warmup": WARMUP}, "clip_grad_norm": None}
    trained, means, is_back = session_lab().run(Case("gpt", mesh, {"optimizer": rule}, job=averaged))[0]
    entry = families.build("gpt")
    keys = {name: value for name, value in rule.items() if name not in ("name", "schedule", "clip_grad_norm")}
    update = ScheduleFree(list(entry.model.parameters()), {"betas": [0.9, 0.95], **keys})
    for step in range(NUM_BATCHES):
        update.param_groups[0]["lr"] = rule["lr"] * min(1.0, (step + 1) / WARMUP)
        update.zero_grad()
        entry.loss(entry.model(**entry.batch(8, step))).backward()
        update.step()
    names = {id(p): name for name, p in entry.model.named_parameters()}
    for parameter, mean in zip(update.param_groups[0]["params"], update.means(), strict=True):
        name = names[id(parameter)]
        assert (trained[name] - parameter.detach()).abs().max() <= 1e-9, name
        assert (means[name] - mean).abs().max() <= 1e-9, name
        assert not torch.equal(mean, parameter), name
    assert is_back


def test_a_save_has_the_mean_that_a_schedule_free_rule_evaluates(tmp_path: Path) -> None:
    entry = families.build("gpt")
    made = plan(entry.model, ruled(entry, RULES["schedule-free"], mesh={}))
    with Engine(made) as engine:
        for step in range(2):
            engine.train_step(entry.batch(8, step))
        engine.save(tmp_path)
        with engine.averaged_weights():
            wanted = engine.gather_parameters()
    with Engine(made, mode="evaluate") as engine:
        engine.load(tmp_path, averaged=True)
        assert all(torch.equal(value, wanted[name]) for name, value in engine.gather_parameters().items())


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"schedule": {"kind": "cosine", "steps": 10}}, "has no schedule beside a warm-up"),
        ({"ema": 0.9}, "has a mean of its own"),
    ],
)
def test_a_schedule_free_rule_beside_a_schedule_or_a_mean_is_refused(keys: dict[str, Any], words: str) -> None:
    entry = families.build("gpt")
    with pytest.raises(PlanError, match=words):
        plan(entry.model, ruled(entry, {**RULES["schedule-free"], **keys}, mesh={}))


def test_every_rule_is_tested() -> None:
    tested = {rule["name"] for rule in RULES.values() if "torch.optim" not in rule["name"]}
    assert tested | {"adamw", "muon"} == UPDATE_RULES.keys()  # test_muon.py


@pytest.mark.thorough
def test_memory_is_that_of_the_moments() -> None:
    entry = families.build("gpt")
    found = {}
    for name, rule in (("adamw", {}), *RULES.items()):
        made = plan(entry.model, ruled(entry, rule, mesh={}))
        found[name] = made.memory[0].optimizer / made.memory[0].gradients
    assert found == {
        "adamw": 2, "adam": 2, "sgd": 0, "sgd, momentum": 1, "sgd, nesterov": 1, "lion": 1, "adagrad": 1,
        "rmsprop": 3, "adamax": 2, "schedule-free": 2,
    }  # fmt: skip
