"""The optimiser's and the learning-rate schedule's numbers, and the schedule itself, a pure function of the step."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    schedule: str = "cosine"
    """`cosine`, `wsd` (warm-up, stable, linear decay) or `constant`; each begins with a linear warm-up."""
    warmup_steps: int | None = 0
    """Steps of linear warm-up from 0; null: a twentieth of train.steps."""
    decay_steps: int | None = None
    """Steps of the final decay of `wsd`; null: a tenth of train.steps."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Adam's decay rates of the first and second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip: float = 1.0
    """Largest global gradient norm; 0: no clipping."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimiser step `step` (1-based) in a run of `total_steps`.

    Warm-up rises linearly and reaches `lr` at step `warmup_steps`. `cosine` then falls to `min_lr` at `total_steps`;
    `wsd` stays at `lr` and falls linearly over the last `decay_steps`; `constant` stays.
    """
    warmup = config.warmup_steps if config.warmup_steps is not None else total_steps // 20
    if step <= warmup:
        return config.lr * step / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        span = max(1, total_steps - warmup)
        progress = min(1.0, (step - warmup) / span)
        return config.min_lr + 0.5 * (config.lr - config.min_lr) * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else max(1, total_steps // 10)
        start = total_steps - decay
        if step <= start:
            return config.lr
        return config.min_lr + (config.lr - config.min_lr) * max(0.0, (total_steps - step) / decay)
    raise ValueError(f"optim.schedule={config.schedule}: use cosine, wsd or constant")
