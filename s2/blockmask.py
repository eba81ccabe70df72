"""A user's own block mask: for every query head, which key blocks each query block attends to."""

from __future__ import annotations

import torch

from .errors import S2Error


class BlockMask:
    """A boolean mask of blocks per query head, causal inside: (h, i, j) True lets query block i of head h see key block j.

    `mask`: (heads, q_blocks, k_blocks) bool. Positions are absolute key positions, as in :class:`S2Pattern`: the last query block is
    that of the last key, keys after a query are never seen whatever the mask says, and with packed documents the mask restarts with
    each one. A mask for longer sequences serves shorter ones by its upper left corner. A row of blocks may be empty: its
    output is 0, its log-sum-exp -inf, its gradients 0.
    """

    def __init__(self, mask: torch.Tensor, block_size: int) -> None:
        if mask.dim() != 3 or mask.dtype != torch.bool or 0 in mask.shape:
            shape = f"{tuple(mask.shape)} {mask.dtype}"
            raise S2Error("mask", shape, "must be a non-empty bool tensor (heads, q_blocks, k_blocks)", "convert it")
        if block_size < 16 or block_size & (block_size - 1):
            raise S2Error("block_size", block_size, "must be a power of two, 16 or more", "use 64 or 128")
        queries, keys = mask.shape[1:]
        i, j = torch.arange(queries, device=mask.device)[:, None], torch.arange(keys, device=mask.device)[None, :]
        self.mask = mask & (j <= i)
        self.block_size = block_size
        self._lists: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def index(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Compact lists of the set blocks on `device`, int32, made once: (row_starts, columns, column_starts, rows).

        The key blocks of query block i of head h are columns[row_starts[h * blocks + i] : row_starts[h * blocks + i + 1]], ascending;
        column_starts and rows say the same of the query blocks of each key block.
        """
        if device not in self._lists:
            square = self.mask[:, : self.blocks, : self.blocks]
            lists = []
            for side in (square, square.transpose(1, 2)):
                starts = torch.nn.functional.pad(side.sum(2).flatten().cumsum(0), (1, 0))
                lists += [starts, side.nonzero()[:, 2]]
            # An empty list still needs an address.
            self._lists[device] = tuple((x if x.numel() else x.new_zeros(1)).to(device, torch.int32) for x in lists)
        return self._lists[device]

    @property
    def local_heads(self) -> int:
        """Query heads of the mask."""
        return self.mask.shape[0]

    @property
    def blocks(self) -> int:
        """Blocks of the longest sequence that the mask describes."""
        return min(self.mask.shape[1:])

    def empty_rows(self, num_blocks: int) -> bool:
        """Whether some query block among the first `num_blocks` attends to nothing."""
        return not bool(self.mask[:, :num_blocks].any(-1).all())

    def is_kv_efficient(self) -> bool:
        """Whether every key block, once dropped by a later query block, is never used again: then a cache may forget it.

        A mask that is not is legal for training and costs a full cache when decoding.
        """
        size = self.blocks
        mask = self.mask[:, :size, :size]
        i, j = torch.arange(size, device=mask.device)[:, None], torch.arange(size, device=mask.device)[None, :]
        dropped = (~mask & (j <= i)).cummax(dim=1).values
        return not bool((mask & dropped).any())
