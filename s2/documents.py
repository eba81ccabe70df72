"""Packed documents: cumulative lengths checked, and the runs of equal lengths that a back end can batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from .errors import S2Error


@dataclass(frozen=True)
class Documents:
    """Documents of a packed row. Tensors stay on their device; :meth:`spans` copies them to the host (and waits for the device)."""

    cu_q: torch.Tensor
    """(n + 1,) int32: document i's queries are the rows cu_q[i] to cu_q[i + 1]."""
    cu_k: torch.Tensor
    """(n + 1,) int32, the same for keys."""
    q_len: int
    """Rows of q."""
    k_len: int
    """Rows of k."""

    def spans(self) -> list[tuple[int, int, int, int]]:
        """(first query, queries, first key, keys) of every non-empty document, checked."""
        starts_q = _starts("cu_seqlens_q", self.cu_q, self.q_len)
        starts_k = starts_q if self.cu_k is self.cu_q else _starts("cu_seqlens_k", self.cu_k, self.k_len)
        spans = []
        for q0, q1, k0, k1 in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
            if q1 - q0 > k1 - k0:
                rule = f"a document has more queries than its {k1 - k0} keys"
                raise S2Error("cu_seqlens_q", q1 - q0, rule, "queries are the last positions")
            if k1 > k0:
                spans.append((q0, q1 - q0, k0, k1 - k0))
        return spans


def _starts(key: str, cu: torch.Tensor, rows: int) -> list[int]:
    starts: list[int] = cu.tolist()
    if starts[0] != 0 or starts[-1] != rows or any(b < a for a, b in pairwise(starts)):
        shown = starts if len(starts) < 9 else f"{starts[:4]}...{starts[-1]}"
        raise S2Error(key, shown, f"must rise from 0 to the {rows} rows", "fix the lengths")
    return starts


def make(cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, batch: int, q_len: int, k_len: int) -> Documents | None:
    """Checks what can be checked without waiting for the device; None when no documents are given."""
    if cu_q is None and cu_k is None:
        return None
    if cu_q is None:
        raise S2Error("cu_seqlens_k", "given", "needs cu_seqlens_q beside it", "give both, or cu_seqlens_q alone when they are equal")
    cu_k = cu_q if cu_k is None else cu_k
    for key, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if cu.dim() != 1 or cu.dtype != torch.int32 or cu.numel() < 2:
            raise S2Error(key, f"{tuple(cu.shape)} {cu.dtype}", "must be an int32 tensor (documents + 1,)", "use cumulative lengths from 0")
    if cu_q.numel() != cu_k.numel():
        rule = f"names other documents than the {cu_q.numel() - 1} of cu_seqlens_q"
        raise S2Error("cu_seqlens_k", cu_k.numel() - 1, rule, "give one pair each")
    if batch != 1:
        raise S2Error("batch", batch, "packed documents need batch 1", "flatten the rows into one")
    return Documents(cu_q, cu_k, q_len, k_len)


def groups(spans: list[tuple[int, int, int, int]]) -> dict[tuple[int, int], list[int]]:
    """Indices of the documents by (queries, keys): those of one size can be computed as a batch. Documents without queries are left out."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, (_, queries, _, keys) in enumerate(spans):
        if queries:
            found.setdefault((queries, keys), []).append(index)
    return found
