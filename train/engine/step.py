"""One optimiser step: forward and backward of all micro-batches, one decision on all ranks, then the update.

The loss is a sum over valid tokens. Gradients are divided once by the global number of valid tokens, so that neither the
split over ranks nor ragged documents change a token's weight.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from train.data.dataset import Batch
from train.engine.parallel import Ranks


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, equal on all ranks. `loss` is in nats a token, `grad_norm` before clipping; `updated` is False when skipped.

    `flags` are the ones given to `train_step`, each true when it was on any rank.
    """

    loss: float
    tokens: int
    target_bytes: float
    grad_norm: float
    updated: bool
    flags: tuple[bool, ...] = ()

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits a byte of the targets' text."""
        return self.loss * self.tokens / math.log(2) / max(self.target_bytes, 1.0)


def _loss(batch: Batch, sums: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict]:
    mask = batch.loss_mask
    # where, not multiplication: a masked token's loss may be infinite and must still count nothing.
    total = torch.where(mask > 0, losses.float() * mask, 0.0).sum()
    count = mask.sum()
    sums += torch.stack((total.detach().double(), count.double(), torch.full_like(count, batch.target_bytes).double()))
    return total, count.to(torch.int), {}


def _forward_step(sums: Tensor, iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Callable]:
    batch = next(iterator)
    output = model(batch.tokens, batch.positions, batch.cu_seqlens, batch.targets, batch.loss_mask)
    return output, functools.partial(_loss, batch, sums)


def run_micro_batches(
    chunks: list[Any], batches: Callable[[], Iterator[Batch]], ranks: Ranks, micro_batches: int, rows: int, seq_len: int, *, train: bool
) -> Tensor:
    """Forward (and backward) all micro-batches. Returns (loss sum, valid tokens, bytes) of this rank's data, float64, on its device.

    `batches()` starts an iterator over the rank's micro-batches; each model chunk reads its own. The sums are zero except on the
    last pipeline stage.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    get_forward_backward_func()(
        forward_step_func=functools.partial(_forward_step, sums),
        data_iterator=[batches() for _ in chunks] if len(chunks) > 1 else batches(),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=micro_batches,
        seq_length=seq_len,
        micro_batch_size=rows,
        forward_only=not train,
    )
    return sums


def _total(sums: Tensor, ranks: Ranks, flags: Sequence[bool] = ()) -> list[float]:
    """The sums over all ranks' data, then for each of `flags` the number of ranks where it is set."""
    # Tensor-parallel ranks hold equal sums; counting only the first of each keeps the total exact.
    share = sums if ranks.groups.tp.rank() == 0 else torch.zeros_like(sums)
    share = torch.cat((share, sums.new_tensor([float(flag) for flag in flags])))
    dist.all_reduce(share)
    return share.tolist()


def train_step(
    chunks: list[Any],
    optimizer: Any,
    batches: Callable[[], Iterator[Batch]],
    ranks: Ranks,
    *,
    micro_batches: int,
    rows: int,
    seq_len: int,
    lr: float,
    flags: Sequence[bool] = (),
) -> StepResult:
    """Run one step at learning rate `lr`. On a NaN or infinite loss or gradient anywhere, no rank updates anything.

    `flags`: what this rank has to tell the others (as many on each rank); they travel with the sums and come back in the result.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    sums = run_micro_batches(chunks, batches, ranks, micro_batches, rows, seq_len, train=True)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    loss_sum, tokens, target_bytes, bad, *told = _total(sums, ranks, (not math.isfinite(norm), *flags))
    updated = not bad and math.isfinite(loss_sum)
    if updated:
        for group in optimizer.param_groups:
            group["lr"] = lr
        clip_and_step(optimizer, norm)
    _balance(chunks, ranks, updated)
    return StepResult(loss_sum / max(tokens, 1.0), int(tokens), target_bytes, norm, updated, tuple(flag > 0 for flag in told))


def _balance(chunks: list[Any], ranks: Ranks, updated: bool) -> None:
    """Let the routers' selection biases follow the step's load; not that of a step that was skipped."""
    if chunks[0].config.num_moe_experts:
        from moe.megatron import update_biases

        update_biases(chunks, ranks.groups.tp_dp_cp, apply=updated)


def clip_and_step(optimizer: Any, norm: float) -> None:
    """Clip prepared gradients to the configured norm and update the weights."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in optimizer.chained_optimizers:
        parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0.0:
            # An optimiser that owns its masters finds its gradients under another name.
            decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, max_norm=part.config.clip_grad, total_norm=norm, use_decoupled_grad=decoupled)
    optimizer.step_with_ready_grads()


@torch.no_grad()
def evaluate(
    chunks: list[Any],
    batches: Callable[[int], Callable[[], Iterator[Batch]]],
    ranks: Ranks,
    *,
    steps: int,
    micro_batches: int,
    rows: int,
    seq_len: int,
) -> tuple[float, float]:
    """Mean loss in nats a token and bits per byte over `steps` global batches, equal on all ranks."""
    for chunk in chunks:
        chunk.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    for step in range(steps):
        totals += run_micro_batches(chunks, batches(step), ranks, micro_batches, rows, seq_len, train=False)
    for chunk in chunks:
        chunk.train()
    loss_sum, tokens, target_bytes = _total(totals, ranks)
    return loss_sum / max(tokens, 1.0), loss_sum / math.log(2) / max(target_bytes, 1.0)
