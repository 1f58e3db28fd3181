"""Links as process groups: one of two ranks for each sender, receiver and direction of the pipeline.

NCCL has no tags and runs the messages of one communicator in one stream: on a shared one, two neighbours that both send
first would wait for each other. On a link of its own every message has one order (``planner.pipeline.links``).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from planner.pipeline.links import links
from runtime.distributed.groups import Groups
from runtime.distributed.nccl_options import link_options


def make_links(groups: Groups) -> None:
    """Fill ``groups.links``. All ranks create all, in one order, for the device's backend alone."""
    backend = groups.backend
    for link in links(groups.mesh.pp, groups.mesh.vpp, groups.mesh.fold):
        for line in groups.mesh.groups("pp"):
            members = sorted((line[link.sender], line[link.receiver]))
            group: Any = dist.new_group(
                members, timeout=groups.timeout, backend=backend, pg_options=link_options(backend)
            )
            if groups.rank in members:
                groups.links[link] = group
                groups.made.append(group)
