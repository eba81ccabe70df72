"""The whole configuration of a run as one frozen dataclass tree, composed from the groups beside their code.

`compose.py` turns Hydra overrides into a :class:`Config`; `check.py` holds the rules across fields. Nothing here imports torch.
"""

from dataclasses import dataclass, field

from moe.config import MoeConfig
from train.checkpoint.config import CheckpointConfig
from train.data.config import DataConfig
from train.engine.config import ParallelConfig
from train.federation.config import FederationConfig
from train.model.config import AttentionConfig, ModelConfig
from train.offload.config import OffloadConfig
from train.optim import OptimConfig
from train.tracking.config import TrackingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run's name and place."""

    name: str | None = None
    """Name of the run; null: made up from the date, the time and chance."""
    dir: str | None = None
    """The run's directory; null: `runs/<name>`."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch and arithmetic of the run."""

    steps: int = 100
    """Optimiser steps."""
    seq_len: int = 512
    """Tokens in a packed row."""
    micro_batch: int = 1
    """Rows that a data-parallel rank passes through the model at once."""
    global_batch: int = 8
    """Rows of one optimiser step over all data-parallel ranks of all sites."""
    seed: int = 1234
    """Seed of weights and data order."""
    precision: str = "bf16"
    """`bf16` (fp32 masters and main gradients) or `fp32`."""
    recompute: str = "none"
    """Activation recomputation: `none`, `selective` (core attention) or `full` (every block)."""
    eval_every: int = 0
    """Steps between validations; 0: only at the end."""
    eval_steps: int = 8
    """Global batches in a validation; 0: none."""
    log_every: int = 1
    """Steps between lines of `metrics.jsonl` and the tracker."""
    deterministic: bool = False
    """Use torch's deterministic kernels; an operation that has none is named in a warning."""
    max_bad_steps: int = 3
    """Consecutive steps with a NaN or infinite loss or gradient that are skipped before the run stops."""
    timeout: float = 600.0
    """Seconds that a collective may take before its process group gives up."""
    hang_timeout: float = 600.0
    """Seconds without progress in a step, a validation or a save after which a rank reports a hang and ends the run; 0: never."""
    max_restarts: int = 0
    """How often the launcher starts the processes again after a failure; they go on from the newest complete checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run is made of; written to `<run>/config.yaml`."""

    run: RunConfig = field(default_factory=RunConfig)
    resume: str | None = None
    """Directory of a run to go on with."""
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
