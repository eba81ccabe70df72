"""torchft's reconfigurable gloo process group, bound to one address of this host.

As shipped, the group binds whatever address the host's name resolves to, which may be an interface that nobody should reach or
none that others do, and the look-up can take seconds.
"""

from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from .lighthouse import quiet_torchft

quiet_torchft()

from torchft.process_group import ProcessGroupGloo as _Reconfigurable  # noqa: E402


class BoundGloo(_Reconfigurable):
    """A group bound to `address` that `join` connects, again and again; `timeout` bounds the connecting and every message."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        super().__init__(timeout=timeout)
        self._address = address

    def join(self, store: Store, rank: int, size: int) -> None:
        """Be rank `rank` of `size`; all ranks find each other under names that `store` has not seen before.

        As torchft's `configure`, which would make a store client each time, and that can take seconds (`moe/store.py`).
        """
        self.abort(errored=False)
        self._pg = self._create_pg(store, rank, size)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._threads = 2
        options._timeout = self._timeout
        backend = ProcessGroupGloo(store, rank, world_size, options)
        pg = ProcessGroup(store, rank, world_size)
        pg._set_default_backend(ProcessGroup.BackendType.GLOO)
        pg._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
        return pg
