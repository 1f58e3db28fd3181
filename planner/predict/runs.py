"""The file of ``meshwright predict``: runs with their measurements, JSON or YAML.

    {"defaults": {"model": {...}, "cluster": "dgx-a100", "spec": {...}},
     "runs": [{"name": "tp 2", "spec": {"mesh": {"tp": 2}}, "measured": {"seconds": 1.9}}, ...]}

A run takes over the defaults, key by key, and has its own values beside them. An error of one run leaves the others as
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from passes.errors import PlanError, SpecError, Where
from planner.cluster.cluster import Cluster
from planner.cluster.read import read_cluster
from planner.files.text import shorten
from planner.spec.fields import Section, key, number
from planner.spec.lines import read_yaml
from planner.spec.messages import spec_error
from planner.spec.schema import json_schema
from planner.spec.spec import Spec

Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False), BeforeValidator(number)]
_TOP = ("defaults", "runs")
_OF_RUN = ("name", "sweep", "model", "cluster", "spec", "measured")


class Measured(Section):
    """Of one run; null: not measured."""

    seconds: Positive | None = key(None, "seconds of a step")
    memory: Positive | None = key(None, "bytes of the fullest device")
    fits: bool | None = key(None, "whether it ran at all; false: out of memory")

    @property
    def ran(self) -> bool | None:
        """Whether the run did; None if the file does not say so."""
        return True if self.fits is None and self.seconds is not None else self.fits


@dataclass(frozen=True)
class Run:
    """One run, checked. ``model``: MODEL of the command line, or the values of a Hugging Face config.json.

    ``sweep``: runs of one sweep are ranked against each other.
    """

    name: str
    sweep: str
    model: str | dict[str, Any]
    cluster: Cluster
    spec: Spec
    measured: Measured


@dataclass(frozen=True)
class Unread:
    """A run that has an error."""

    name: str
    sweep: str
    why: str


def read_runs(path: Path) -> list[Run | Unread]:
    """The runs of a file in their order. Raises SpecError if the file has none."""
    value, locations = read_yaml(path, "file of runs")
    at = Where(file=str(path), line=1)
    fix = 'write {"defaults": {...}, "runs": [...]}'
    if not isinstance(value, Mapping) or not isinstance(value.get("runs"), list) or not value["runs"]:
        raise SpecError("the file has no list of runs", where=at, fix=fix)
    if unknown := [name for name in value if name not in _TOP]:
        raise SpecError(f"unknown key {shorten(unknown[0])}", where=locations.get(str(unknown[0]), at), fix=fix)
    defaults = value.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise SpecError("defaults is not a mapping", where=locations.get("defaults", at), fix=fix)
    runs = [_run(defaults, given, number) for number, given in enumerate(value["runs"])]
    return runs


def _run(defaults: Mapping[str, Any], given: Any, number: int) -> Run | Unread:
    if not isinstance(given, Mapping):
        return Unread(f"run {number + 1}", "", f"it is a {type(given).__name__}, not a mapping")
    values = merged(defaults, given)
    name, sweep = str(values.get("name") or f"run {number + 1}"), str(values.get("sweep") or "")
    try:
        return _checked(values, name, sweep)
    except PlanError as error:
        return Unread(name, sweep, " ".join(str(error).split()))


def _checked(values: Mapping[str, Any], name: str, sweep: str) -> Run:
    """Raises PlanError."""
    if unknown := [item for item in values if item not in _OF_RUN]:
        raise SpecError(f"unknown key {shorten(unknown[0])}", fix=f"write {', '.join(_OF_RUN)}")
    for needed in ("model", "cluster", "spec"):
        if not values.get(needed):
            raise SpecError(f"it has no {needed}", fix=f"write {needed} in the run, or in defaults")
    if not isinstance(values["model"], (str, Mapping)):
        raise SpecError("model is neither a name nor a mapping", fix="write MODEL, or the values of a config.json")
    measured = values.get("measured") or {}
    try:
        found = Measured.model_validate(measured)
    except ValidationError as error:
        raise spec_error(error, measured, {}, json_schema(Measured), "measured") from None
    model = values["model"] if isinstance(values["model"], str) else dict(values["model"])
    spec = Spec.load(values["spec"])
    if spec.mesh.has_auto:
        raise SpecError("its mesh is auto", where="mesh", fix="write the layout that was measured")
    return Run(name, sweep, model, cluster_of(values["cluster"]), spec, found)


def cluster_of(given: Any) -> Cluster:
    """A cluster file by name, or ``base`` with other values: links by their names. Raises PlanError."""
    if isinstance(given, str):
        return read_cluster(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("base"), str):
        fix = "write the name of a cluster file, or {base: NAME, overlap: 0.0}"
        raise SpecError("cluster is neither a name nor a mapping with a base", where="cluster", fix=fix)
    base = read_cluster(given["base"]).to_dict()
    more = {name: value for name, value in given.items() if name != "base"}
    links = more.pop("links", {})
    known = [link["name"] for link in base["links"]]
    fix = f"write {{NAME: {{bandwidth: …}}}}; the links are {', '.join(known)}"
    if not isinstance(links, Mapping):
        raise SpecError("links is not a mapping", where="cluster.links", fix=fix)
    if unknown := [name for name in links if name not in known]:
        raise SpecError(f"there is no link {shorten(unknown[0])}", where="cluster.links", fix=fix)
    values = merged(base, more)
    values["links"] = [merged(link, links.get(link["name"], {})) for link in base["links"]]
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        raise spec_error(error, values, {}, json_schema(Cluster), "the cluster") from None


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the values of ``more``; mappings in both are merged, anything else is replaced."""
    found = dict(base)
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value) if both else value
    return found
