"""Floating-point operations of training, and the share of the device's peak that a run uses (MFU).

Counted are the matrix multiplications that the model asks for: 2 operations for each multiply-add, three times the forward pass
for forward and backward (the gradients of inputs and of weights cost one forward each). Not counted: norms, rotary positions,
softmax, activation functions, the optimiser, and what a schedule or recomputation does twice. Attention counts exactly the
(query, key) pairs that causality and, when `pattern_aware`, the S2 pattern keep in a row of one document; boundaries of packed
documents remove more pairs, which are counted all the same. The vocabulary counts without padding.
"""

import numpy as np

from moe.config import MoeConfig
from train.config.check import attention_pattern
from train.config.plan import count_parameters
from train.config.schema import Config
from train.model.config import ModelConfig
from train.tracking.devices import device_peak_flops as device_peak_flops

BACKWARD_AND_FORWARD = 3


def _size(section: ModelConfig | MoeConfig, name: str) -> int:
    """A size that `train.config.check` has filled in."""
    value = getattr(section, name)
    if value is None:
        key = f"{'moe' if isinstance(section, MoeConfig) else 'model'}.{name}"
        raise ValueError(f"{key}=null: counting needs the derived sizes; use the configuration that train.config.check returns")
    return int(value)


def multiplied_weights(config: Config) -> int:
    """Matrix weights that one token is multiplied with: all that it passes through but the norms and the looked-up embedding."""
    width, vocab_size = config.model.width, _size(config.model, "vocab_size")
    for name in ("kv_heads", "head_dim", "ffn_width"):
        _size(config.model, name)
    if config.moe.experts:
        _size(config.moe, "ffn_width")
    norms = width * (2 * config.model.layers + 1)
    return count_parameters(config)["active"] - norms - (0 if config.model.tied else width * vocab_size)


def attention_pairs(config: Config, seq_len: int, pattern_aware: bool) -> np.ndarray:
    """(layers,) float64: mean over the query heads of the (query, key) pairs that a layer keeps in a row of `seq_len` tokens."""
    causal = seq_len * (seq_len + 1) / 2
    if not pattern_aware:
        return np.full(config.model.layers, causal)
    pattern = attention_pattern(config)
    return np.array([pattern.for_layer(layer).pairs(seq_len).mean() for layer in range(config.model.layers)])


def train_flops_per_token(config: Config, seq_len: int, pattern_aware: bool) -> float:
    """Operations of forward and backward for one token of a row of `seq_len` tokens.

    6 x (matrix weights a token passes through, output head included) + 12 x heads x head_dim x (pairs kept / seq_len) a layer:
    a kept pair costs a multiply-add of width head_dim for its score and one for its value.
    """
    pairs = float(attention_pairs(config, seq_len, pattern_aware).sum())
    forward = 2 * multiplied_weights(config) + 4 * config.model.heads * _size(config.model, "head_dim") * pairs / seq_len
    return BACKWARD_AND_FORWARD * forward


class UtilisationMeter:
    """Turns tokens per second into MFU; knows the two counts once for the run."""

    def __init__(self, config: Config, world_size: int, device_name: str | None) -> None:
        """`world_size` devices called `device_name` (None: a CPU, whose peak is not known)."""
        self.pattern_flops = train_flops_per_token(config, config.train.seq_len, pattern_aware=True)
        self.dense_flops = train_flops_per_token(config, config.train.seq_len, pattern_aware=False)
        peak = device_peak_flops(device_name, config.train.precision) if device_name is not None else None
        self._peak = peak * world_size if peak is not None else None

    def figures(self, tokens_per_second: float) -> dict[str, float]:
        """`mfu` (the pairs that the pattern keeps) and `mfu_dense` (all causal pairs), shares of the peak; {} when it is unknown.

        `tokens_per_second` counts the tokens of all devices together.
        """
        if self._peak is None:
            return {}
        return {
            "mfu": tokens_per_second * self.pattern_flops / self._peak,
            "mfu_dense": tokens_per_second * self.dense_flops / self._peak,
        }
