"""Published runs beside their estimates: seconds of a step and bytes of the fullest device.

    python -m benchmarks.predicted [FILE…]          default: benchmarks/published.json

    {"defaults": {"sweep": "…", "model": {config.json}, "cluster": "dgx-a100" | {"base": "dgx-a100", "overlap": 0.0},
                  "spec": {…}},
     "runs": [{"name": "tp 2", "spec": {"mesh": {"tp": 2}},
               "measured": {"seconds": 1.9, "memory": 6e10, "fits": true}}]}

A run takes over the defaults, key by key. Each model is captured once on the meta device, and each run is one point of
the search's own space, so that the figures are those that a search compares.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from scipy.stats import spearmanr
from torch import nn

from passes.errors import PlanError
from planner.capture.model.reference import load_model
from planner.captured import Captured, capture_model, inputs_of, prepare
from planner.cluster.cluster import Cluster, read_cluster
from planner.cost.estimate import Estimate
from planner.cost.planned import usable_bytes
from planner.pause_gc import gc_paused
from planner.pipeline.layout import may_be_alone
from planner.report.section import Section
from planner.report.text import sections_text
from planner.search.best_first import Candidate, gigabytes, percent, seconds_text
from planner.search.cuts import Cuts
from planner.search.search import num_behind
from planner.search.space import Cut, Space
from planner.search.winner import spec_to_capture
from planner.spec.spec import Spec

PUBLISHED = Path(__file__).parent / "published.json"
OF_LAYOUT = ("mesh", "batch", "pipeline", "recompute", "cluster", "devices")  # keys that need no other capture
FEW = 2  # sequences of the microbatch that is captured
FEWEST = 3  # timed runs that have an order
YES = {True: "yes", False: "no", None: "-"}


@dataclass(frozen=True)
class Run:
    """One run of a file. Runs of one ``sweep`` are ranked against each other; null: not measured."""

    name: str
    sweep: str
    model: str | dict[str, Any]
    cluster: Cluster
    spec: Spec
    seconds: float | None = None
    memory: float | None = None
    fits: bool | None = None

    @property
    def ran(self) -> bool | None:
        return True if self.fits is None and self.seconds is not None else self.fits


@dataclass(frozen=True)
class Predicted:
    run: Run
    candidate: Candidate

    @property
    def fits(self) -> bool:
        return self.candidate.fullest.total <= usable_bytes(self.run.cluster)

    @property
    def error(self) -> float | None:
        return self.candidate.seconds / self.run.seconds - 1 if self.run.seconds else None

    @property
    def is_within(self) -> bool:
        low, high = self.candidate.estimate.cost.range
        return low <= (self.run.seconds or 0.0) <= high

    @property
    def memory_error(self) -> float | None:
        return self.candidate.fullest.total / self.run.memory - 1 if self.run.memory else None


def read_runs(path: Path) -> list[Run]:
    value = json.loads(path.read_text())
    return [_run(**_merged(value.get("defaults", {}), given)) for given in value["runs"]]


def _run(*, name: str, model: Any, cluster: Any, spec: Any, measured: Mapping[str, Any], sweep: str = "all") -> Run:
    return Run(name, sweep, model, cluster_of(cluster), Spec.load({"compile": False, **spec}), **measured)


def cluster_of(given: str | Mapping[str, Any]) -> Cluster:
    """A cluster file by name, or ``base`` with other values: links by their names."""
    if isinstance(given, str):
        return read_cluster(given)
    base, more = read_cluster(given["base"]).to_dict(), dict(given)
    links = more.pop("links", {})
    values = _merged(base, {name: value for name, value in more.items() if name != "base"})
    values["links"] = [_merged(link, links.get(link["name"], {})) for link in base["links"]]
    return Cluster.model_validate(values)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = _merged(found[name], value) if both else value
    return found


@dataclass
class Predictor:
    """Owns the captures and cuts, by the keys that they depend on."""

    captured: dict[str, Captured] = field(default_factory=dict)
    cuts: dict[tuple[str, str, bool], Cuts] = field(default_factory=dict)

    def of(self, run: Run) -> Predicted:
        """Raises PlanError if the model, the batch or the cluster does not admit the layout."""
        recompute = str(run.spec.recompute)
        key = (_key(run), recompute, may_be_alone(run.spec.pipeline.split))
        with gc_paused():
            if key not in self.cuts:
                self.cuts[key] = self._made(run, key[0], recompute)
            return Predicted(run, _candidate(run, self.cuts[key], recompute))

    def _made(self, run: Run, name: str, recompute: str) -> Cuts:
        times = 1 if run.spec.num_microbatches == 1 else 2
        batch = run.spec.batch.model_copy(update={"global_size": FEW * times, "micro": FEW})
        spec = spec_to_capture(run.spec.model_copy(update={"batch": batch}), None)
        if name not in self.captured:
            self.captured[name] = capture_model(_built(run.model), spec, inputs_of(spec, None))
        return Cuts(prepare(self.captured[name], spec), spec, (recompute,), run.cluster)


def _candidate(run: Run, cuts: Cuts, recompute: str) -> Candidate:
    mesh: Any = run.spec.mesh
    space = Space(run.spec, mesh.tp * mesh.cp * mesh.pp * mesh.dp, run.cluster.links[0].devices, cuts.facts)
    cut = Cut(mesh.tp, run.spec.tensor_parallel.sequence_parallel is True, mesh.cp, mesh.ep, mesh.etp)
    points = list(space.points(cut, partial(cuts.stages, cut)))
    if not points:
        why = next(iter(space.pruned), "the batch or the model does not divide into it")
        raise PlanError(f"this layout is not possible: {why}", where=run.name, fix="correct mesh, batch or pipeline")
    work = cuts.works(points[0].cut)[recompute]
    return Candidate(points[0], Estimate(work, points[0].layout, run.cluster, run.spec))


def _key(run: Run) -> str:
    """Of runs that share a capture."""
    values = {name: value for name, value in run.spec.to_dict().items() if name not in OF_LAYOUT}
    sharded = {k: v for k, v in values.pop("tensor_parallel", {}).items() if k != "sequence_parallel"}
    machine = run.cluster.device.is_gpu, run.cluster.links[0].devices
    shared = (run.model, values, sharded, run.spec.num_microbatches == 1, machine)
    return json.dumps(shared, sort_keys=True, default=str)


def _built(model: str | dict[str, Any]) -> nn.Module:
    if isinstance(model, str):
        return load_model(model)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.json"
        file.write_text(json.dumps(model))
        return load_model(f"hf:{file}")


def runs_table(found: Sequence[Predicted]) -> Section:
    columns = ("run", "measured", "predicted", "between", "error", "memory", "of", "fits", "did")
    rows = tuple(
        (p.run.name, seconds_text(p.run.seconds) if p.run.seconds else "-", seconds_text(p.candidate.seconds),
         " and ".join(map(seconds_text, p.candidate.estimate.cost.range)), _signed(p.error),
         gigabytes(p.candidate.fullest.total), gigabytes(usable_bytes(p.run.cluster)), YES[p.fits], YES[p.run.ran])
        for p in found
    )  # fmt: skip
    note = "seconds of a step; memory of the fullest rank, of what a process may fill"
    return Section("Predicted beside measured", columns, rows, note, frozenset(columns[1:7]))


def sweeps_table(found: Sequence[Predicted]) -> Section:
    columns = (
        "sweep",
        "runs",
        "timed",
        "median error",
        "bias",
        "in range",
        "rank",
        "chosen",
        "behind",
        "fits",
        "memory",
    )
    rows = tuple(sweep_row(name, list(of)) for name, of in groupby(found, key=lambda p: p.run.sweep))
    note = (
        "rank: Spearman's correlation of predicted and measured seconds; chosen: the layout that a search would take "
        "of those that were timed; behind: how much slower it was than the fastest; fits: said rightly"
    )
    return Section("Sweeps", columns, rows, note, frozenset(columns[1:7]))


def sweep_row(name: str, of: list[Predicted]) -> tuple[str, ...]:
    timed = [p for p in of if p.run.seconds]
    measured = [p.run.seconds or 0.0 for p in timed]
    errors = [p.error for p in timed if p.error is not None]
    judged = [p for p in of if p.run.ran is not None]
    sized = [abs(p.memory_error) for p in of if p.memory_error is not None]
    ranked = len(timed) >= FEWEST
    chosen = _chosen(timed) if ranked else None
    return (
        name, str(len(of)), str(len(timed)), percent(median(map(abs, errors))) if errors else "-",
        _signed(median(errors)) if errors else "-",
        f"{sum(p.is_within for p in timed)} of {len(timed)}" if timed else "-",
        f"{spearmanr(measured, [p.candidate.seconds for p in timed])[0]:.2f}" if ranked else "-",
        chosen.run.name if chosen else "-",
        percent((chosen.run.seconds or 0.0) / min(measured) - 1) if chosen else "-",
        f"{sum(p.fits == p.run.ran for p in judged)} of {len(judged)}" if judged else "-",
        percent(median(sized)) if sized else "-",
    )  # fmt: skip


def _chosen(timed: Sequence[Predicted]) -> Predicted | None:
    """As a search would, of those that were timed and fit by their prediction."""
    fitting = sorted((p for p in timed if p.fits), key=lambda p: p.candidate.order)
    if not fitting:
        return None
    return fitting[num_behind([p.candidate for p in fitting], fitting[0].run.cluster.uncertainty)]


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=[PUBLISHED])
    for file in parser.parse_args().files:
        predictor = Predictor()
        found = [predictor.of(run) for run in read_runs(file)]
        print(sections_text([runs_table(found), sweeps_table(found)]))


if __name__ == "__main__":
    main()
