"""Rules about the place of the optimiser's states, and the choice that `offload.mode=auto` leaves to the machine."""

from dataclasses import replace

from train.config.errors import ConfigError
from train.config.schema import Config
from train.engine.layout import ParallelLayout, processes_of_host
from train.offload.config import OffloadConfig
from train.offload.deepspeed import Unavailable, load, why_not
from train.offload.machine import cores, gpu_bytes, host_bytes
from train.offload.plan import choose
from train.offload.rates import current

DEVICE_SHARE = 0.92
"""Share of the GPU's memory that `auto` plans with; the rest is for CUDA, NCCL, the allocator's waste and the model's error."""
HOST_SHARE = 0.9
"""Share of the host's free memory that `auto` plans with."""
GIB = 2**30


def check_offload(config: Config, layout: ParallelLayout) -> OffloadConfig:
    """Return the mode and fraction of a run whose other sizes are filled in; `auto` is resolved. Raises ConfigError."""
    offload = config.offload
    if not 0.0 < offload.fraction <= 1.0:
        raise ConfigError("offload.fraction", offload.fraction, "it is a share of the states' bytes", "use a number over 0 and up to 1")
    if offload.fraction != 1.0 and offload.mode in ("none", "auto"):
        rule = "nothing is on the host with offload.mode=none" if offload.mode == "none" else "offload.mode=auto chooses its own"
        raise ConfigError("offload.fraction", offload.fraction, rule, "leave it out, or use offload=stream or offload=cpu_step")
    if offload.mode != "none" and not config.parallel.distributed_optimizer:
        rule = "offloaded states are those of the distributed optimiser, and parallel.distributed_optimizer=false"
        raise ConfigError("offload.mode", offload.mode, rule, "use parallel.distributed_optimizer=true, or offload=none")
    if not offload.prefetch and offload.mode not in ("stream", "auto"):
        rule = f"only offload=stream brings states ahead of the step, and offload.mode={offload.mode}"
        raise ConfigError("offload.prefetch", False, rule, "leave it out, or use offload=stream")
    _check_cpu_adam(offload)
    return _resolved(config, layout) if offload.mode == "auto" else offload


def _check_cpu_adam(offload: OffloadConfig) -> None:
    if offload.cpu_adam == "torch":
        return
    if offload.mode not in ("cpu_step", "auto"):
        rule = f"only offload=cpu_step updates on the host, and offload.mode={offload.mode}"
        raise ConfigError("offload.cpu_adam", offload.cpu_adam, rule, "leave it out, or use offload=cpu_step")
    reason = why_not() if offload.cpu_adam == "deepspeed" else None
    if reason is not None:
        raise ConfigError("offload.cpu_adam", "deepspeed", reason, "mend that, or use offload.cpu_adam=torch")


def prepare_offload(offload: OffloadConfig) -> None:
    """Have DeepSpeed's Adam built where a checked `offload` insists on it: minutes on first use. Raises ConfigError when it cannot be.

    In a rank's process, before anything else is expensive.
    """
    if offload.mode != "cpu_step" or offload.cpu_adam != "deepspeed":
        return
    try:
        load()
    except Unavailable as reason:
        raise ConfigError("offload.cpu_adam", "deepspeed", str(reason), "mend that, or use offload.cpu_adam=torch") from reason


def _resolved(config: Config, layout: ParallelLayout) -> OffloadConfig:
    from train.config.plan import memory_model, optimizer_parts  # the plan stands on the checks

    try:
        device = gpu_bytes()
    except OSError as error:
        raise ConfigError("offload.mode", "auto", str(error), "choose offload=none, offload=stream or offload=cpu_step") from error
    if device is None:  # host and device are the same memory: moving states within it saves nothing
        return OffloadConfig()
    local = processes_of_host(config)
    rest = memory_model(replace(config, offload=OffloadConfig()), layout)
    others = (rest["total"] - rest["optimizer"]) * GIB
    room, host = DEVICE_SHARE * device - others, HOST_SHARE * host_bytes() / local
    low, threads = config.train.precision == "bf16", max(1, cores() // local)
    chosen = choose(optimizer_parts(config, layout), low, room, host, threads, current())
    if chosen is None:
        rule = (
            f"no share of the states on the host makes the run fit: weights, gradients and activations take {others / GIB:.1f} GiB of "
            f"{device / GIB:.1f} by the plan's model, and the host has {host / GIB:.1f} GiB for each process"
        )
        raise ConfigError("offload.mode", "auto", rule, "use train.recompute=full, more processes or a smaller model")
    asked = config.offload
    return OffloadConfig(
        mode=chosen.mode,
        fraction=chosen.fraction or 1.0,
        prefetch=asked.prefetch or chosen.mode != "stream",
        cpu_adam=asked.cpu_adam if chosen.mode == "cpu_step" else "torch",
    )
