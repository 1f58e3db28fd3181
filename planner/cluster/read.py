"""Read a cluster file: YAML; reports all errors at once, each with a line number."""

from __future__ import annotations

from pydantic import ValidationError

from passes.errors import SpecError, Where
from planner.cluster.cluster import Cluster
from planner.spec.cluster import cluster_path, no_cluster
from planner.spec.lines import read_yaml
from planner.spec.messages import spec_error
from planner.spec.schema import json_schema


def read_cluster(path: str) -> Cluster:
    """The cluster of a YAML file: at ``path``, or one that is shipped and has this name.

    Raises SpecError: all errors of the file, each with a line number and a fix.
    """
    found = cluster_path(path)
    if found is None:
        raise no_cluster(path, ["."], "")
    value, locations = read_yaml(found, "cluster")
    if not isinstance(value, dict):
        raise SpecError(
            "the cluster file is not a mapping", where=Where(file=str(found), line=1), fix="write `key: value` pairs"
        )
    try:
        return Cluster.model_validate(value).located(locations)
    except ValidationError as error:
        raise spec_error(error, value, locations, json_schema(Cluster), "the cluster file") from None
