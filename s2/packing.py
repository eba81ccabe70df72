"""Runs a function over the documents of a packed row, documents of equal lengths as one batch, with cheap gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .documents import Documents, groups


def each_group(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    documents: Documents | None,
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns attend(q, k, v) of every document, put together again; shapes as in `s2_attention`.

    Rows are cut with `split`, whose gradient is one concatenation; slices would each add a gradient of the whole row.
    """
    if documents is None:
        return attend(q, k, v)
    spans = documents.spans()
    found = groups(spans)
    if len(found) == 1 and len(next(iter(found.values()))) == len(spans):
        stacked = (x.reshape(len(spans), -1, *x.shape[2:]) for x in (q, k, v))
        return attend(*stacked).reshape(*q.shape[:3], v.shape[3])
    q_parts = q[0].split([span[1] for span in spans])
    k_parts, v_parts = (x[0].split([span[3] for span in spans]) for x in (k, v))
    parts = [part.new_empty(0, q.shape[2], v.shape[3]) for part in q_parts]
    for members in found.values():
        out = attend(*(torch.stack([x[i] for i in members]) for x in (q_parts, k_parts, v_parts)))
        for index, part in zip(members, out.unbind(0), strict=True):
            parts[index] = part
    return torch.cat(parts)[None]
