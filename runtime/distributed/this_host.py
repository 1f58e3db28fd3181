"""A launch needs of this host: short names of sockets, files that may be open, and its loopback. One error for each."""

from __future__ import annotations

import os
from multiprocessing import util

from passes.errors import PlanError
from planner.files.text import OPEN_FILES_FIX
from runtime.distributed.loopback import check_loopback

MOST_BYTES = 80  # of the directory of a socket: sockaddr_un has 104 to 108 for both
_FEWEST_FILES, _FILES = 64, 1024  # open at once: two ranks and their launcher have up to 40 each; more ranks more


def check_host() -> None:
    """Raise PlanError for a lack that would end ranks later, or let them wait."""
    check_directory()
    _check_open_files()
    check_loopback()


def check_directory() -> None:
    """Raise PlanError if a socket in the directory for temporary files would have too long a name."""
    length = len(os.fsencode(util.get_temp_dir()))
    if length > MOST_BYTES:
        raise PlanError(
            f"the directory for temporary files has a path of {length} bytes, and a socket in it takes at most "
            f"{MOST_BYTES}",
            where="TMPDIR",
            fix="set TMPDIR to a directory with a short path, such as /tmp",
        )


def _check_open_files() -> None:
    """Raises the soft limit as far as the hard one allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        soft = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < _FEWEST_FILES:
            what = f"a process may have {soft} files open, and ranks need {_FEWEST_FILES} or more"
            raise PlanError(what, where="the limit of open files", fix=OPEN_FILES_FIX)
