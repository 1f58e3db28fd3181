"""The file that ``cluster`` names: found, and valid YAML, before anything is decided with it.

A relative path is taken from the working directory, and failing that from the folder of the spec file.
"""

from __future__ import annotations

from pathlib import Path

from planner.errors import SpecError, Where
from planner.spec.lines import read_yaml


def find_cluster(given: str | None, at: Where) -> str | None:
    """The path at which the cluster file lies. ``at``: where the spec names it.

    Raises SpecError where there is no such file (at the spec's line) or it is not valid (at its own line).
    """
    if given is None:
        return None
    places = [Path(given)]
    if at.file and not places[0].is_absolute():
        places.append(Path(at.file).parent / given)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked = " and ".join(dict.fromkeys(str(place.parent) for place in places))
        raise SpecError(
            f"cluster: there is no file {given} (looked in {looked})",
            where=at,
            fix="name a YAML file that describes the machines, or remove the key",
        )
    value, _ = read_yaml(found, "cluster")
    if not isinstance(value, dict):
        raise SpecError(
            "the cluster file is no mapping", where=Where(file=str(found), line=1), fix="write `key: value` pairs"
        )
    return str(found)
