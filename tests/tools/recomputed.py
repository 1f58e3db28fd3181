"""Programs of models with recomputation, and comparison of their gradients."""

from functools import cache

import torch
from torch import Tensor, nn

from passes.base import RankProgram
from planner import Plan
from planner.lower import lower
from runtime.weights.shards import fill
from runtime.weights.sources import ModelWeights
from tests.models import families
from tests.tools.captures import plan_again
from tests.tools.simulated_mesh import spec_of

KINDS = ("full", "selective")


def model_of(name: str) -> nn.Module:
    return families.build(name).model.train()


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@cache
def planned(name: str, kind: str, **mesh: int) -> Plan:
    batch = families.build(name).batch(8, 0)
    schedule = {"pipeline": {"schedule": "interleaved_1f1b"}} if mesh.get("vpp", 1) > 1 else {}
    sections = {"batch": {"global": 8, "micro": 2}, "recompute": kind, **schedule}
    return plan_again(model_of(name), spec_of(batch, mesh) | sections)


def programs_of(made: Plan, name: str) -> list[RankProgram]:
    return filled(made, model_of(name))


def filled(made: Plan, model: nn.Module) -> list[RankProgram]:
    """The programs of a pipeline's ranks, with the weights of ``model``."""
    programs = [lower(made, made.mesh.rank_of(pp=pp)) for pp in range(made.mesh.pp)]
    for rank, program in enumerate(programs):
        fill(program.stages, ModelWeights(model), made.mesh, made.mesh.place(rank), torch.device("cpu"))
    return programs
