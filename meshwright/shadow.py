"""Report clearly when a user's own directory shadows one of our packages.

Our packages have plain names. A directory of the same name next to a user's script is found first by Python, and the
import fails with an error that names nothing useful. ``refuse_shadows`` runs when a package of ours is imported; it
stands in the one package whose name is unlikely to be anyone else's.
"""

import importlib.util
import sys
from pathlib import Path

OUR_PACKAGES = ("planner", "passes", "runtime")


def refuse_shadows() -> None:
    """Raise ImportError, naming the directory, if one of our packages would be imported from somewhere else."""
    home = Path(__file__).resolve().parent.parent
    for package in OUR_PACKAGES:
        found = _location(package)
        if found is not None and found != home / package:
            raise ImportError(
                f"{found} hides meshwright's package {package!r} ({home / package}).\n"
                f"  fix: rename your directory {package!r}, or start Python from another directory"
            )


def _location(package: str) -> Path | None:
    """The directory or file that ``import package`` gives now, or None if there is none."""
    module = sys.modules.get(package)
    spec = module.__spec__ if module is not None else importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
