"""Every rule that spans fields, checked before a process group exists, and the derived sizes filled in.

`check(config, world_size)` is what stands between a composed configuration and a run; rules of the parallel axes are in
`train.engine.layout`, of the run's folder in `train.config.place`. Nothing here imports torch.
"""

from dataclasses import replace

from moe.config import MoeConfig
from s2.errors import S2Error
from s2.pattern import S2Pattern
from train.config.check_data import check_data
from train.config.check_federation import check_federation
from train.config.check_offload import check_offload
from train.config.errors import ConfigError
from train.config.schema import Config, TrainConfig
from train.engine.layout import ParallelLayout, ffn_width, head_dim
from train.model.config import AttentionConfig, ModelConfig
from train.optim import OptimConfig

CHOICES = {
    "train.precision": ("bf16", "fp32"),
    "train.recompute": ("none", "selective", "full"),
    "moe.mode": ("full", "skip", "mask", "frozen"),
    "moe.gate": ("full", "kept"),
    "federation.policy": ("contiguous", "strided", "random", "rotating"),
    "federation.weights": ("none", "tokens"),
    "federation.router_rows": ("holders", "all"),
    "federation.transfer_dtype": ("fp32", "bf16", "int8"),
    "attention.kind": ("dense", "s2"),
    "attention.per": ("kv_head", "q_head"),
    "attention.backend": ("auto", "triton", "flex", "sdpa", "reference"),
    "offload.mode": ("none", "stream", "cpu_step", "auto"),
    "offload.cpu_adam": ("torch", "deepspeed", "auto"),
    "optim.schedule": ("cosine", "wsd", "constant"),
    "tracking.kind": ("wandb", "tensorboard", "none"),
    "tracking.mode": ("offline", "online"),
    "checkpoint.on_failure": ("stop", "continue"),
}
AT_LEAST_ONE = (
    "federation.sites", "train.steps", "train.seq_len", "train.micro_batch", "train.global_batch", "train.log_every", "model.layers",
    "model.width", "model.ffn_width", "model.heads", "model.kv_heads", "model.head_dim", "model.vocab_size", "attention.block_size",
    "attention.local_blocks", "attention.stride", "attention.step", "attention.rotate", "moe.top_k", "moe.ffn_width", "moe.shared_width",
    "parallel.processes", "parallel.hosts", "optim.decay_steps", "checkpoint.keep", "federation.replication",
    "federation.rotate_every", "federation.sync_every", "federation.quorum", "federation.fragments",
)  # fmt: skip
AT_LEAST_ZERO = (
    "train.eval_every", "train.eval_steps", "train.max_bad_steps", "train.seed", "moe.experts", "moe.aux_coef", "moe.z_coef",
    "attention.offset", "attention.dense_heads", "optim.min_lr", "optim.warmup_steps", "optim.clip", "optim.weight_decay",
    "checkpoint.every", "checkpoint.keep_every", "train.hang_timeout", "train.max_restarts", "moe.bias_rate", "federation.overlap_steps",
    "federation.probe",
)  # fmt: skip
ABOVE_ZERO = (
    "train.timeout",
    "model.rope_base",
    "model.norm_eps",
    "model.init_std",
    "optim.lr",
    "optim.eps",
    "tracking.start_timeout",
    "federation.outer_lr",
    "federation.deadline",
)


def check(config: Config, world_size: int) -> Config:
    """Return `config` with the derived sizes filled in, or raise ConfigError for the first rule that it breaks.

    `world_size` is the number of processes of the run. Filled in: model.ffn_width, kv_heads, head_dim, vocab_size; moe.ffn_width;
    what `offload.mode=auto` chooses.
    Reads the headers of the data sets and the tokenizer; touches no process group and writes nothing.
    """
    _check_values(config)
    _check_model(config.model)
    config = replace(config, model=_derived(config.model))
    config = replace(config, moe=_checked_moe(config.moe, config.model))
    _check_train(config.train)
    _check_optim(config.optim, config.train)
    attention_pattern(config)
    check_federation(config)
    layout = ParallelLayout.build(config, world_size)
    vocabulary = check_data(config)
    config = replace(config, model=replace(config.model, vocab_size=vocabulary))
    return replace(config, offload=check_offload(config, layout))


def attention_pattern(config: Config) -> S2Pattern:
    """Return the S2 pattern of the whole model; stride 1 when attention is dense. Raises ConfigError in the command line's keys."""
    model, attention = config.model, config.attention
    kv_heads = model.kv_heads or model.heads
    if attention.kind == "dense":
        return S2Pattern(num_heads=model.heads, num_kv_heads=kv_heads, stride=1)
    dense_layers = attention.dense_layers
    try:
        pattern = S2Pattern(
            num_heads=model.heads,
            num_kv_heads=kv_heads,
            block_size=attention.block_size,
            local_blocks=attention.local_blocks,
            stride=attention.stride,
            offset=attention.offset,
            step=attention.step,
            dense_heads=attention.dense_heads,
            per=attention.per,
            dense_layers=tuple(dense_layers) if isinstance(dense_layers, list) else dense_layers,
            rotate=attention.rotate,
        )
        pattern.check_layers(model.layers)
    except S2Error as error:
        key = {"num_kv_heads": "model.kv_heads", "num_heads": "model.heads"}.get(error.key, f"attention.{error.key}")
        raise ConfigError(key, error.value, error.rule or str(error), error.remedy or "correct it") from error
    _check_block(attention, config.train.seq_len)
    if attention.backend == "sdpa" and not all(pattern.for_layer(layer).is_dense for layer in range(model.layers)):
        raise ConfigError(
            "attention.backend", "sdpa", "it runs dense layers only, and this model has sparse ones", "use attention.backend=auto"
        )
    return pattern


def _check_block(attention: AttentionConfig, seq_len: int) -> None:
    if attention.block_size > seq_len:
        raise ConfigError(
            "attention.block_size", attention.block_size, f"exceeds train.seq_len={seq_len}", "use a smaller block or a longer sequence"
        )


def _value(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _check_values(config: Config) -> None:
    """Names from closed lists and signs of numbers."""
    for key, choices in CHOICES.items():
        value = _value(config, key)
        if value not in choices:
            raise ConfigError(key, value, "there is no such choice", f"choose one of {', '.join(choices)}")
    for keys, low, rule, remedy in (
        (AT_LEAST_ONE, 1, "must be 1 or more", "use a positive number"),
        (AT_LEAST_ZERO, 0, "must not be negative", "use 0 or more"),
    ):
        for key in keys:
            value = _value(config, key)
            if isinstance(value, (int, float)) and value < low:
                raise ConfigError(key, value, rule, remedy)
    for key in ABOVE_ZERO:
        value = _value(config, key)
        if isinstance(value, (int, float)) and value <= 0:
            raise ConfigError(key, value, "must be over 0", "use a positive number")


def _check_model(model: ModelConfig) -> None:
    if model.head_dim is None and model.width % model.heads:
        raise ConfigError("model.heads", model.heads, f"must divide model.width={model.width}", "choose a divisor, or set model.head_dim")
    if head_dim(model) % 2:
        rule = "rotary positions turn pairs of numbers: the width of a head must be even"
        raise ConfigError("model.head_dim", head_dim(model), rule, f"set model.head_dim={head_dim(model) + 1}")
    if model.kv_heads is not None and model.heads % model.kv_heads:
        raise ConfigError("model.kv_heads", model.kv_heads, f"must divide model.heads={model.heads}", "choose a divisor")


def _derived(model: ModelConfig) -> ModelConfig:
    return replace(model, ffn_width=ffn_width(model), kv_heads=model.kv_heads or model.heads, head_dim=head_dim(model))


def _checked_moe(moe: MoeConfig, model: ModelConfig) -> MoeConfig:
    if not moe.experts:
        return moe
    if moe.top_k > moe.experts:
        raise ConfigError(
            "moe.top_k", moe.top_k, f"a token cannot be sent to more than moe.experts={moe.experts}", "use fewer, or more experts"
        )
    try:
        blocks = moe.blocks(model.layers)
    except ValueError as error:
        raise ConfigError("moe.layers", moe.layers, str(error), "write all, every:N or a list of 0-based block numbers") from error
    if not blocks:
        raise ConfigError("moe.layers", moe.layers, f"names none of the {model.layers} blocks", "name one, or use moe=none")
    return replace(moe, ffn_width=moe.ffn_width or model.ffn_width)


def _check_train(train: TrainConfig) -> None:
    if train.eval_every and not train.eval_steps:
        raise ConfigError(
            "train.eval_steps", 0, f"train.eval_every={train.eval_every} asks for validations", "use 1 or more, or eval_every=0"
        )
    if train.seed >= 2**31:
        raise ConfigError("train.seed", train.seed, "must be under 2^31", "choose a smaller seed")


def _check_optim(optim: OptimConfig, train: TrainConfig) -> None:
    if len(optim.betas) != 2:
        raise ConfigError("optim.betas", optim.betas, "Adam has two decay rates", "write optim.betas=[0.9,0.95]")
    if not all(0.0 <= beta < 1.0 for beta in optim.betas):
        raise ConfigError("optim.betas", optim.betas, "decay rates are at least 0 and under 1", "write optim.betas=[0.9,0.95]")
    if optim.min_lr > optim.lr:
        raise ConfigError("optim.min_lr", optim.min_lr, f"exceeds optim.lr={optim.lr}", "use a smaller min_lr")
    warmup = optim.warmup_steps if optim.warmup_steps is not None else train.steps // 20
    if warmup > train.steps:
        raise ConfigError("optim.warmup_steps", optim.warmup_steps, f"exceeds train.steps={train.steps}", "use a shorter warm-up")
    if optim.schedule == "wsd":
        decay = optim.decay_steps if optim.decay_steps is not None else max(1, train.steps // 10)
        if warmup + decay > train.steps:
            rule = f"optim.warmup_steps={warmup} and {decay} steps of decay exceed train.steps={train.steps}"
            raise ConfigError("optim.decay_steps", optim.decay_steps, rule, "shorten one of them")
    elif optim.decay_steps is not None:
        raise ConfigError(
            "optim.decay_steps", optim.decay_steps, f"only wsd has a decay of its own, and optim.schedule={optim.schedule}", "use optim=wsd"
        )
