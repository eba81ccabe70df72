"""Several sites in one pool of ranks: each is a world of its own inside the pool's, as torchrun would have made it.

    with sub_worlds(2) as sites:           # in a job on a pool of 4: ranks 0, 1 are site 0, ranks 2, 3 site 1
        dist.get_world_size()              # 2

Torch has no public way to nest worlds: the default group is replaced for as long as the block lasts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_GROUPS = 100_000
"""More process groups than a job ever makes."""


@dataclass
class Sites:
    """Where this rank stands: `site` of `count`, `world` the group of all sites' ranks."""

    site: int
    count: int
    world: Any
    across: Any
    """Group of the ranks that have this rank's number in their sites."""


@contextmanager
def sub_worlds(count: int) -> Iterator[Sites]:
    """Split the pool's world into `count` sites of equal size (collective)."""
    world, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size() // count
    numbers = dist.distributed_c10d._world
    first = numbers.group_count
    inside = [dist.new_group(range(site * size, (site + 1) * size)) for site in range(count)]
    across = [dist.new_group(range(place, size * count, size)) for place in range(size)]
    dist.distributed_c10d._update_default_pg(inside[rank // size])
    try:
        yield Sites(rank // size, count, world, across[rank % size])
    finally:
        dist.distributed_c10d._update_default_pg(world)
        # torch numbers groups by how many a process has made, and a site may have made more than another.
        assert numbers.group_count < first + _GROUPS
        numbers.group_count = first + _GROUPS
