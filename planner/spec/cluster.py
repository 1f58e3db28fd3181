"""The file that ``cluster`` names: found, and valid YAML, before anything is decided with it.

A relative path is taken from the working directory, and failing that from the folder of the spec file. A name found in
neither may be a shipped file: ``dgx-h100``, or ``specs/clusters/dgx-h100.yaml``.
"""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from passes.errors import SpecError, Where
from planner.files.text import shorten
from planner.spec.lines import read_yaml

FOLDER = Path("specs", "clusters")
_SHIPPED = (
    Path(__file__).resolve().parents[2] / FOLDER
)  # packages are installed side by side; a user may have own specs


def find_cluster(given: str | None, at: Where) -> str | None:
    """Return the path of the cluster file; for a shipped one the ``given`` name, valid on any machine.

    ``at``: its place in the spec. Raises SpecError if there is no such file (at the spec's line) or it is not valid
    YAML (at its own line).
    """
    if given is None:
        return None
    places = [Path(given)]
    if at.file and not places[0].is_absolute():
        places.append(Path(at.file).parent / given)
    found = next((place for place in places if os.path.isfile(place)), None)
    path = found or shipped_cluster(given)
    if path is None:
        raise no_cluster(given, dict.fromkeys(str(place.parent) for place in places), at)
    cluster_values(path)
    return given if found is None else str(found)


def cluster_values(path: Path) -> tuple[dict[str, Any], dict[str, Where]]:
    """Return the mapping in the file, and the place of each key. Raises SpecError if there is no mapping."""
    value, locations = read_yaml(path, "cluster")
    if not isinstance(value, dict):
        where = Where(file=str(path), line=1)
        raise SpecError("the cluster file is not a mapping", where=where, fix="write `key: value` pairs")
    return value, locations


def cluster_path(given: str) -> Path | None:
    """Return the file with this path, or the shipped one with this name."""
    return Path(given) if os.path.isfile(given) else shipped_cluster(given)


def shipped_cluster(given: str) -> Path | None:
    """Return the shipped file named by ``dgx-h100``, ``dgx-h100.yaml`` or ``specs/clusters/dgx-h100.yaml``."""
    path = Path(given)
    is_bare = path.parent in (Path(), FOLDER) and path.stem in shipped_names()
    return _SHIPPED / f"{path.stem}.yaml" if is_bare and path.suffix in ("", ".yaml") else None


def shipped_names() -> list[str]:
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def no_cluster(given: str, looked: Iterable[str], at: Where | str) -> SpecError:
    names = shipped_names()
    nearest = next(iter(difflib.get_close_matches(Path(given).stem[:100], names, n=1)), None)
    hint = f"did you mean {nearest}? " if nearest else ""
    return SpecError(
        f"cluster: there is no file {shorten(given)} (looked in {' and '.join(looked)})",
        where=at,
        fix=f"{hint}name a YAML file that describes the machines, or a shipped one: {', '.join(names)}",
    )
