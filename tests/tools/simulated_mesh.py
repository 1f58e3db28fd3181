"""A model spread over the ranks of a mesh without pipeline, which are threads, and held against one process.

    equals_one_process(make, batch, mesh)      loss, every gradient, and how often each rank exchanges
    run_mesh(make, batch, mesh)                the same without the comparison

A model is built twice by the same function: what is planned and what is compared with share nothing. A batch is one
microbatch for each dp rank. Gradients are added up here as the plan says that they are to be.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from passes.base import RankProgram, StageModule
from passes.parameters import LocalParameter
from planner import Plan
from planner.lower import lower
from planner.mesh import Mesh
from planner.sharding.boxes import Box, Part
from runtime.optimizer.main_shards import whole_elements
from runtime.weights.shards import fill, runs_in, senders_of
from runtime.weights.sources import ModelWeights
from tests.tools.captures import plan_again
from tests.tools.ranks import Ranks
from tests.tools.specs import inputs_of

Batch = dict[str, Tensor]
Make = Callable[[], nn.Module]
CPU = torch.device("cpu")
AXES = {
    "tp": ("dense", "tp"),
    "cp": ("dense", "cp"),
    "dp": ("dense", "dp"),
    "dp-cp": ("dense", "dp-cp"),
    "etp": ("expert", "tp"),
    "ep": ("expert", "ep"),
}


def spec_of(batch: Batch, mesh: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """``batch`` is the global one, of one microbatch for each dp rank. A padded vocabulary is padded little."""
    rows = len(next(iter(batch.values())))
    return {
        "mesh": dict(mesh),
        "batch": {"global": rows, "micro": rows // mesh.get("dp", 1)},
        "inputs": inputs_of(batch),
        "tensor_parallel": {"vocabulary_multiple": 8},
    } | more


class Spread:
    """A model planned, lowered and filled for every rank, and what each dp rank has of a batch.

    ``change``: what is done to each rank's program before it runs. All ranks compute on ``device``.
    """

    def __init__(
        self,
        make: Make,
        batch: Batch,
        mesh: Mapping[str, int],
        *,
        change: Callable[[RankProgram], None] = lambda _: None,
        device: torch.device = CPU,
        **more: Any,
    ) -> None:
        model, self.device = make(), device
        self.plan = plan_again(model, spec_of(batch, mesh, **more))
        self.mesh = self.plan.mesh
        ranks = range(self.mesh.world_size)
        # Ops are tried at the shapes of the first and of the last rank: between them only places differ, not sizes.
        self.programs = [lower(self.plan, r, device, thorough=r in (ranks[0], ranks[-1])) for r in ranks]
        for rank, program in enumerate(self.programs):
            fill(program.stages, ModelWeights(model), self.mesh, self.mesh.place(rank), device)
            change(program)
        self.batches = shares_of({n: x.to(device) for n, x in batch.items()}, self.mesh.dp)
        self.totals = self.programs[0].totals(self.batches)

    def run(self, job: Callable[[RankProgram, Batch, list[Tensor]], Any]) -> list[Any]:
        """``job(program, batch, totals)`` of each rank."""

        def on_rank(rank: int) -> Any:
            program, dp = self.programs[rank], self.mesh.place(rank)["dp"]
            bind([program], self.mesh, rank)
            program.load.begin(self.device)
            program.random.begin(0, dp)  # a microbatch each
            return job(program, self.batches[dp], self.totals)

        return Ranks(self.plan).run(on_rank)


def shares_of(batch: Batch, count: int) -> list[Batch]:
    """Its microbatches, or those of the dp ranks."""
    return [{name: x.chunk(count)[i] for name, x in batch.items()} for i in range(count)]


def bind(programs: Sequence[RankProgram], mesh: Mesh, rank: int, among: Sequence[int] | None = None) -> None:
    """The same groups on every thread, each made by all, in one order; ``among``: the ranks that have a thread."""
    threads = list(range(mesh.world_size)) if among is None else list(among)
    for name, (kind, token) in AXES.items():
        for ranks in getattr(mesh, kind).groups(token):
            if set(ranks) <= set(threads):
                group = dist.new_group([threads.index(r) for r in ranks])
                for program in programs if rank in ranks else ():
                    if name in program.axes:
                        program.axes[name].group = group


def given_to(stage: StageModule, batch: Batch, totals: list[Tensor]) -> list[Tensor]:
    """What a stage reads beside the stage before."""
    return [batch[name] for name in stage.inputs] + [totals[i].double() for i in stage.denominators]


def _step(program: RankProgram, batch: Batch, totals: list[Tensor]) -> tuple[Tensor, Batch]:
    """Loss, and gradients of this rank."""
    (stage,) = program.stages
    loss = stage.module(*given_to(stage, batch, totals))[-1]
    loss.backward()
    leaves = {p.fqn: stage.parameter(p.fqn) for p in stage.parameters}
    found = {n: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).cpu() for n, leaf in leaves.items()}
    dist.barrier()
    return loss.detach().cpu(), found


class Truth(NamedTuple):
    """What one process finds; a parameter that gets no gradient has zeros."""

    loss: Tensor
    gradients: dict[str, Tensor]


@dataclass
class Ran:
    """What the ranks found: loss and whole gradients, and of each rank its program and its own gradients."""

    plan: Plan
    loss: Tensor
    gradients: dict[str, Tensor]
    programs: list[RankProgram]
    of_ranks: list[dict[str, Tensor]]
    truth: Truth = field(init=False)  # of a comparison

    def apart(self, truth: Truth) -> dict[str, float]:
        """Of each gradient, as a share of the norm of all; one that no rank holds counts as zeros."""
        norm = torch.stack([g.double().norm() for g in truth.gradients.values()]).norm()
        held = {n: self.gradients.get(n, torch.zeros_like(g)).double() for n, g in truth.gradients.items()}
        return {n: float((held[n] - g.double()).norm() / norm) for n, g in truth.gradients.items()}


def run_mesh(make: Make, batch: Batch, mesh: Mapping[str, int], **how: Any) -> Ran:
    """``how``: a device, a change and sections of the spec, as Spread takes them."""
    spread = Spread(make, batch, mesh, **how)
    ran = spread.run(_step)
    firsts = [loss for rank, (loss, _) in enumerate(ran) if spread.mesh.place(rank)["tp"] == 0]
    gradients = [found for _, found in ran]
    whole = _whole(spread.plan, spread.programs, gradients)
    return Ran(spread.plan, torch.stack(firsts).sum(), whole, spread.programs, gradients)


def one_process(model: nn.Module, loss: Tensor, names: Container[str] = ()) -> Truth:
    """A tied parameter has that of its names which is in ``names``, else its first."""
    loss.backward()
    named: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names or parameter not in named:
            named[parameter] = name
    return Truth(loss.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for p, n in named.items()})


def loss_of(output: Any) -> Tensor:
    """The loss among what a model returns: by its name, or the first number."""
    if isinstance(output, Tensor) or hasattr(output, "loss"):
        return output if isinstance(output, Tensor) else output.loss
    return next(x for x in (output.values() if isinstance(output, dict) else output) if x.dim() == 0)


def equals_one_process(
    make: Make,
    batch: Batch,
    mesh: Mapping[str, int],
    *,
    loss: float = 1e-10,
    gradient: float = 1e-10,
    each: tuple[float, float] | None = None,
    truth: Make | None = None,
    alone: Callable[[nn.Module], Tensor] | None = None,
    **how: Any,
) -> Ran:
    """Raises AssertionError where a loss or a gradient is further apart, or a rank exchanges other than the plan says.

    ``gradient``: of each, as a share of the norm of all; with ``each`` (relative, absolute) element by element instead.
    ``truth``: the model of the one process, where it is another; ``alone(model)``: its loss, where it is not that of
    the whole batch.
    """
    ran, model = run_mesh(make, batch, mesh, **how), (truth or make)()
    known = ran.truth = one_process(model, loss_of(model(**batch)) if alone is None else alone(model), ran.gradients)
    torch.testing.assert_close(ran.loss.double(), known.loss.double(), rtol=loss, atol=0.0)
    assert any(g.any() for g in known.gradients.values())
    far = {
        name: f"{share:.1e} of the gradients' norm" for name, share in ran.apart(known).items() if not share <= gradient
    }
    assert each is not None or not far, far
    for name, wanted in known.gradients.items() if each is not None else ():
        found = ran.gradients.get(name, torch.zeros_like(wanted))
        torch.testing.assert_close(found, wanted, rtol=each[0], atol=each[1], msg=lambda text, n=name: f"{n}: {text}")
    for rank, program in enumerate(ran.programs):
        assert counted(program) == exchanges_of(ran.plan), f"rank {rank}"
    return ran


def counted(program: RankProgram) -> Counter[tuple[str, str, str]]:
    """(axis, kind, phase) → how often, of what a rank exchanged."""
    return Counter({(axis.name, *key): n for axis in program.axes.values() for key, n in axis.counts.items() if n})


def exchanges_of(made: Plan) -> Counter[tuple[str, str, str]]:
    """The same by the plan, of a microbatch."""
    found: Counter[tuple[str, str, str]] = Counter()
    for row in made.collectives:
        if row.per == "microbatch":
            found[row.axis.split()[0], row.kind, row.phase] += row.count
    return found


def _whole(made: Plan, programs: list[RankProgram], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    held: dict[str, dict[int, LocalParameter]] = {}
    for rank, program in enumerate(programs):
        for p in program.stages[0].parameters:
            held.setdefault(p.fqn, {})[rank] = p
    found = {}
    for row in made.parameters:
        if row.name in held:
            senders = senders_of(row, made.mesh)
            sums = [_summed(made.mesh, held[row.name], grads, row.name, rank) for rank in senders]
            found[row.name] = assemble(list(senders.values()), sums, row.shape)
    return found


def _summed(
    mesh: Mesh, held: Mapping[int, LocalParameter], grads: list[dict[str, Tensor]], name: str, rank: int
) -> Tensor:
    """Over the ranks that run other microbatches, and those with partial gradients, as the parameter says."""
    local, here = held[rank], mesh.place(rank)
    own = ("tp", "cp", "dp") if local.expert is None else ("etp", "ep", "edp")
    free = {*local.reduced_over.split("-"), *(a for a in local.partial_over if a in own)}
    fixed = [axis for axis in own if axis not in free]
    sharers = [r for r in held if all(mesh.place(r)[a] == here[a] for a in fixed)]
    summed = torch.stack([grads[r][name] for r in sharers]).sum(0)
    if not local.has_whole_segment:
        return summed
    same = [grads[r][name] for r in sharers if mesh.place(r)[local.axis] == here[local.axis]]
    mask = whole_elements(local, mesh.size(local.axis)).view(local.shape)
    return torch.where(mask, summed, torch.stack(same).sum(0))  # what is cut beside them is this rank's own


def assemble(parts: Sequence[Part], shards: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The full tensor of all its parts, without padding."""
    full = shards[0].new_empty(tuple(shape))
    for part, held in zip(parts, shards, strict=True):
        for local, place in runs_in(part.ranges, Box.whole(shape)):
            full[place.slices].copy_(held[local])
    return full
