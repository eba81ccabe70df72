"""RMSNorm for Megatron-core without Transformer Engine or Apex.

Core's own fallback refuses sequence parallelism. Here each rank normalises its slice of the sequence, and the weight is
marked `sequence_parallel`, which makes core sum its gradient over the tensor-parallel ranks.
"""

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dim; x (..., width), computed in x's dtype by torch's fused kernel.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
