"""A Mixture-of-Experts layer on a site that holds only some of its experts. Plain torch.

The router scores all E experts. With T = top-k of a token and R the resident set, the token is computed by S = T and R:

    y = sum over e in S of g_e FFN_e(x)         S empty: y = 0, and the residual connection around the layer carries x

| mode | meaning |
|---|---|
| full | every expert is here: an ordinary layer |
| skip | assignments to absent experts are dropped before any expert sees them: no compute and no traffic |
| mask | absent experts leave the choice: every token keeps k experts (no saving; a control) |
| frozen | every expert is here, foreign ones do not learn: their weights get zero gradients (a control) |

Gate: `full` takes g = softmax over T as it is, `kept` renormalises over S. Balance is counted on T, before skipping: a count of
S would make absent experts look unused, and balancing would push ever more tokens to them.

Dims: T tokens, E experts, H width, F inner width, k experts a token, n experts held.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .experts import FreezeRows, grouped_experts

Mode = Literal["full", "skip", "mask", "frozen"]
Gate = Literal["full", "kept"]


class Router(nn.Module):
    """Linear scores of all E experts in fp32, and a bias that steers the choice but not the gates.

    `update_bias` moves the bias by the sign of each expert's shortfall: balance without an auxiliary loss.
    """

    bias: Tensor

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k={top_k}: a token uses 1 to num_experts={num_experts} different experts; give a number between")
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, width))
        self.register_buffer("bias", torch.zeros(num_experts))
        nn.init.normal_(self.weight, std=width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (T, E) of x (T, H), in fp32 or better."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.to(dtype) @ self.weight.to(dtype).T

    @torch.no_grad()
    def update_bias(self, load: Tensor, rate: float) -> None:
        """Raise the bias of experts under the mean of `load` (E,), the tokens per expert, by `rate`; lower that of those above."""
        load = load.to(self.bias.dtype)
        self.bias += rate * torch.sign(load.mean() - load)


class StackedExperts(nn.Module):
    """`count` SwiGLU experts: `w_in` (n, 2F, H) with the gate's rows first, `w_out` (n, H, F)."""

    def __init__(self, count: int, width: int, inner: int) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.w_out = nn.Parameter(torch.empty(count, width, inner))
        nn.init.normal_(self.w_in, std=width**-0.5)
        nn.init.normal_(self.w_out, std=inner**-0.5)


@dataclass(frozen=True)
class SkipStats:
    """What one forward pass did; all on the layer's device."""

    kept: Tensor
    """Assignments computed, ()."""
    skipped: Tensor
    """Assignments dropped, ()."""
    load: Tensor
    """Assignments of each expert before skipping, (E,) int64."""
    none_resident: Tensor
    """Tokens without any resident expert, ()."""
    aux_loss: Tensor
    """E * sum over e of (share of assignments before skipping) * (mean router probability), (); 1 when balanced. Times its
    coefficient it is added to the loss."""
    z_loss: Tensor
    """Mean over tokens of logsumexp(z)^2, ()."""


class SkipMoE(nn.Module):
    """Router and the experts that this site holds.

    In modes skip and mask slot i of `experts` is expert `resident[i]`, so any subset in any order can be held; in modes full and
    frozen slot e is expert e.
    """

    def __init__(self, router: Router, experts: StackedExperts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor, resident: Sequence[int], mode: Mode = "skip", gate: Gate = "full") -> tuple[Tensor, SkipStats]:
        """x (T, H) -> y (T, H) and its statistics.

        `resident` lists the global numbers of this site's experts. T = 0 is fine. Raises ValueError on an unknown mode or gate, on
        a gate without effect, on residents that do not fit the mode or the experts held, and in mode mask on fewer residents than k.
        """
        logits = self.router(x)
        num_experts, top_k = logits.shape[-1], self.router.top_k
        w_in: Tensor = self.experts.w_in
        w_out: Tensor = self.experts.w_out
        _check(resident, mode, gate, num_experts, top_k, w_in.shape[0])
        here = torch.zeros(num_experts, dtype=torch.bool, device=x.device)
        here[list(resident)] = True
        if mode == "mask":
            logits = logits.masked_fill(~here, -torch.inf)

        chosen = (logits.detach() + self.router.bias).topk(top_k, dim=-1).indices
        keep = here[chosen] if mode == "skip" else torch.ones_like(chosen, dtype=torch.bool)
        gates = _gates(logits.gather(-1, chosen), keep, gate)
        stats = _stats(logits, chosen, keep)

        if mode in ("skip", "mask"):
            slot = torch.full((num_experts,), -1, dtype=torch.long, device=x.device)
            slot[list(resident)] = torch.arange(len(resident), device=x.device)
        else:
            slot = torch.arange(num_experts, device=x.device)
        if mode == "frozen":
            w_in, w_out = FreezeRows.apply(w_in, here), FreezeRows.apply(w_out, here)
        return _compute(x, slot[chosen], keep, gates, w_in, w_out), stats


def _gates(chosen_logits: Tensor, keep: Tensor, gate: Gate) -> Tensor:
    """Gate of each assignment (T, k); those of dropped assignments mean nothing."""
    if gate == "full":
        return chosen_logits.softmax(-1)
    # A row without any kept assignment would be a softmax over nothing: NaN, also in its gradient. It takes finite logits instead.
    empty = ~keep.any(-1, keepdim=True)
    return chosen_logits.masked_fill(~keep & ~empty, -torch.inf).softmax(-1)


def _compute(x: Tensor, slots: Tensor, keep: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Sum of the kept experts' outputs; sizes come from what is kept, so dropped assignments cost nothing."""
    token, place = keep.nonzero(as_tuple=True)
    by_slot = slots[token, place].argsort(stable=True)
    token, place = token[by_slot], place[by_slot]
    ordered = slots[token, place]
    counts = torch.zeros(w_in.shape[0], dtype=torch.long, device=x.device).scatter_add_(0, ordered, torch.ones_like(ordered))
    out = grouped_experts(x[token], counts, w_in, w_out, gates[token, place])
    # Summed in fp32: up to k terms a token, rounded once.
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return total.index_add(0, token, out.to(total.dtype)).to(x.dtype)


def _stats(logits: Tensor, chosen: Tensor, keep: Tensor) -> SkipStats:
    tokens, num_experts = logits.shape
    flat = chosen.flatten()
    load = torch.zeros(num_experts, dtype=torch.long, device=logits.device).scatter_add_(0, flat, torch.ones_like(flat))
    kept = keep.sum()
    # max(., 1): without tokens both losses are zeros that still reach the router, not NaN.
    share = load / max(chosen.numel(), 1)
    probability = logits.softmax(-1).sum(0) / max(tokens, 1)
    return SkipStats(
        kept=kept,
        skipped=chosen.numel() - kept,
        load=load,
        none_resident=(~keep.any(-1)).sum(),
        aux_loss=num_experts * (share * probability).sum(),
        z_loss=logits.logsumexp(-1).square().sum() / max(tokens, 1),
    )


def _check(resident: Sequence[int], mode: str, gate: str, num_experts: int, top_k: int, held: int) -> None:
    check_residents(resident, mode, gate, num_experts, top_k)
    wanted = len(resident) if mode in ("skip", "mask") else num_experts
    if held != wanted:
        raise ValueError(f"experts: {held} are stacked, mode={mode} computes {wanted}; stack one slot for each")


def check_residents(resident: Sequence[int], mode: str, gate: str, num_experts: int, top_k: int) -> None:
    """Raise ValueError on an unknown mode or gate, a gate without effect, or residents that the mode cannot work with."""
    if mode not in ("full", "skip", "mask", "frozen"):
        raise ValueError(f"mode={mode}: must be full, skip, mask or frozen; choose one")
    if gate not in ("full", "kept"):
        raise ValueError(f"gate={gate}: must be full or kept; choose one")
    if gate == "kept" and mode != "skip":
        raise ValueError(f"gate=kept: has no effect in mode={mode}, which drops nothing; use gate=full")
    if not resident or len(set(resident)) != len(resident) or any(not 0 <= e < num_experts for e in resident):
        raise ValueError(f"resident={list(resident)}: must be one or more experts, each once, from 0 to {num_experts - 1}; correct it")
    if mode == "full" and len(resident) != num_experts:
        raise ValueError(f"resident={list(resident)}: mode=full needs all {num_experts} experts; use mode=skip")
    if mode == "mask" and len(resident) < top_k:
        raise ValueError(f"resident={list(resident)}: mode=mask needs at least top_k={top_k} experts; hold more or use mode=skip")
