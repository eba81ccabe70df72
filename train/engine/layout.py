"""How the processes of a run are arranged, and every divisibility rule that the arrangement has. Free of torch.

The grid of the ordinary layers is tp x cp x dp x pp (tp varies fastest). Experts have a grid of their own over the same processes,
ep x edp x pp: an expert's matrices are not split (expert tensor parallelism 1), so the experts of a stage are shared out over its
tp x cp x dp processes, as Megatron-core 0.19 asks (`world % (ep * pp) == 0`).
"""

import math
from dataclasses import dataclass

from train.config.errors import ConfigError
from train.config.schema import Config
from train.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Sizes of the axes of a checked run."""

    world: int
    """Processes of the run."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    vpp: int
    """Model chunks in a stage."""
    cp: int
    """Context-parallel ranks."""
    ep: int
    """Expert-parallel ranks."""
    sp: bool
    """Sequence parallelism over the tensor-parallel ranks."""
    sites: int = 1
    """Sites of the run; the other sizes are those of one site."""

    @classmethod
    def build(cls, config: Config, world: int) -> "ParallelLayout":
        """Return the layout of `config` on `world` processes, or raise ConfigError for the first rule that it breaks.

        Works before and after the derived sizes are filled in.
        """
        parallel = config.parallel
        for key in ("tp", "pp", "vpp", "cp", "ep"):
            _positive(f"parallel.{key}", getattr(parallel, key))
        if world < 1:
            raise ConfigError("parallel.processes", world, "a run has at least one process", "set parallel.processes=1 or more")
        _positive("train.micro_batch", config.train.micro_batch)
        _positive("train.global_batch", config.train.global_batch)
        layout = cls(
            world=world,
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp,
            cp=parallel.cp,
            ep=parallel.ep,
            sp=parallel.sp,
            sites=config.federation.sites,
        )
        layout._check_world()
        layout._check_tensor(config)
        layout._check_pipeline(config)
        layout._check_experts(config)
        layout._check_batch(config)
        return layout

    @property
    def dp(self) -> int:
        """Data-parallel ranks: what the other axes leave."""
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.ep * self.pp)

    def micro_batches(self, config: Config) -> int:
        """Micro-batches that a data-parallel rank passes through the model in one optimiser step."""
        return config.train.global_batch // (config.train.micro_batch * self.dp * self.sites)

    def describe(self) -> str:
        """Return the axes that are in use, in words: `dp 2 x tp 2 (+sp), ep 2`."""
        axes = [("dp", self.dp), ("tp", self.tp), ("pp", self.pp), ("cp", self.cp)]
        text = " x ".join(f"{name} {size}" for name, size in axes if size > 1 or name == "dp")
        if self.sp:
            text += " (+sp)"
        if self.vpp > 1:
            text += f", {self.vpp} chunks a stage"
        return text + (f", ep {self.ep}" if self.ep > 1 else "")

    def _check_world(self) -> None:
        if self.cp != 1:
            raise ConfigError("parallel.cp", self.cp, "attention over context-parallel ranks is not there yet", "use parallel.cp=1")
        for key, size in (("tp", self.tp), ("pp", self.pp)):
            if self.world % size:
                raise ConfigError(
                    f"parallel.{key}", size, f"must divide the {self.world} processes", _processes_remedy(key, self.tp * self.pp)
                )
        product = self.tp * self.pp * self.cp
        if self.world % product:
            raise ConfigError(
                "parallel.tp", self.tp, f"tp x pp = {product} must divide the {self.world} processes", _processes_remedy("tp", product)
            )

    def _check_tensor(self, config: Config) -> None:
        tp, model, seq_len = self.tp, config.model, config.train.seq_len
        if self.sp and tp == 1:
            raise ConfigError(
                "parallel.sp", True, "sequence parallelism splits over tensor-parallel ranks, and parallel.tp=1", "use parallel.sp=false"
            )
        if tp == 1:
            return
        if model.heads % tp:
            raise ConfigError("parallel.tp", tp, f"must divide model.heads={model.heads}", "choose another number of heads or of ranks")
        kv_heads = model.kv_heads or model.heads
        if kv_heads % tp and tp % kv_heads:
            raise ConfigError(
                "parallel.tp", tp, f"must divide model.kv_heads={kv_heads} or be a multiple of it", "choose another model.kv_heads"
            )
        qkv = (model.heads + 2 * kv_heads) * head_dim(model)
        if qkv % tp:
            raise ConfigError(
                "parallel.tp", tp, f"must divide the width {qkv} of queries, keys and values together", "choose another head_dim or tp"
            )
        if model.width % tp:
            raise ConfigError("parallel.tp", tp, f"must divide model.width={model.width}", "choose another width or number of ranks")
        if ffn_width(model) % tp:
            raise ConfigError(
                "parallel.tp", tp, f"must divide model.ffn_width={ffn_width(model)}", f"set model.ffn_width to a multiple of {tp}"
            )
        if self.sp and seq_len % tp:
            raise ConfigError(
                "parallel.sp", True, f"train.seq_len={seq_len} must be a multiple of parallel.tp={tp}", "choose another sequence length"
            )

    def _check_pipeline(self, config: Config) -> None:
        layers, pp, vpp = config.model.layers, self.pp, self.vpp
        if vpp > 1 and pp == 1:
            raise ConfigError(
                "parallel.vpp", vpp, "interleaving needs pipeline stages, and parallel.pp=1", "use parallel.vpp=1 or parallel.pp=2"
            )
        if layers % (pp * vpp):
            chunks = f"parallel.pp={pp} x parallel.vpp={vpp}" if vpp > 1 else f"parallel.pp={pp}"
            raise ConfigError(
                "model.layers", layers, f"must be a multiple of {chunks}", f"use {-(-layers // (pp * vpp)) * pp * vpp} layers"
            )

    def _check_experts(self, config: Config) -> None:
        ep, moe, stage = self.ep, config.moe, self.world // self.pp
        if not moe.experts:
            if ep > 1:
                raise ConfigError(
                    "parallel.ep", ep, "expert parallelism needs experts, and moe.experts=0", "use parallel.ep=1 or moe=mixtral"
                )
            return
        if stage % ep:
            raise ConfigError(
                "parallel.ep",
                ep,
                f"must divide the {stage} processes of a pipeline stage (tp {self.tp} x dp {self.dp})",
                "choose a divisor",
            )
        # A site that holds some of the experts shares out those: `check_federation` looks at each layer.
        some = config.federation.sites > 1 and moe.mode in ("skip", "mask")
        if moe.experts % ep and not some:
            raise ConfigError("parallel.ep", ep, f"must divide moe.experts={moe.experts}", "choose a divisor, or another number of experts")
        if self.tp > 1 and not self.sp:
            rule = f"experts with parallel.tp={self.tp} need sequence parallelism, or ranks would route the same tokens twice"
            raise ConfigError("parallel.sp", False, rule, "use parallel.sp=true")
        if moe.shared_width and moe.shared_width % self.tp:
            raise ConfigError("moe.shared_width", moe.shared_width, f"must be a multiple of parallel.tp={self.tp}", "choose another width")

    def _check_batch(self, config: Config) -> None:
        train = config.train
        rows = train.micro_batch * self.dp * self.sites
        if train.global_batch % rows:
            rule = f"must be a multiple of train.micro_batch={train.micro_batch} x {self.dp} data-parallel ranks" + (
                f" x {self.sites} sites" if self.sites > 1 else ""
            )
            raise ConfigError("train.global_batch", train.global_batch, rule, f"use {-(-train.global_batch // rows) * rows}")
        count = self.micro_batches(config)
        if self.vpp > 1 and count % self.pp:
            rule = f"interleaving passes micro-batches in groups of parallel.pp={self.pp}, and a step has {count} of them"
            raise ConfigError("train.global_batch", train.global_batch, rule, f"use a multiple of {rows * self.pp}")


def processes_of_host(config: Config) -> int:
    """Processes that the launcher starts on one host: as given, or as many as the axes of a site and the sites ask for."""
    parallel = config.parallel
    if parallel.processes is not None:
        return parallel.processes
    site = parallel.pp * parallel.cp * math.lcm(parallel.tp, parallel.ep)
    return site * (config.federation.sites if config.federation.site is None else 1)


def processes_of_site(config: Config) -> int:
    """Processes of one site on this host: all of them, unless the launcher starts several sites here."""
    shared = config.federation.site is None and config.federation.sites > 1
    return processes_of_host(config) // config.federation.sites if shared else processes_of_host(config)


def head_dim(model: ModelConfig) -> int:
    """Width of a head: as given, or the residual width shared out over the heads."""
    return model.head_dim if model.head_dim is not None else model.width // model.heads


def ffn_width(model: ModelConfig) -> int:
    """Inner width of the SwiGLU MLP: as given, or 8/3 of the residual width rounded up to a multiple of 64."""
    return model.ffn_width if model.ffn_width is not None else -(-8 * model.width // (3 * 64)) * 64


def _positive(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(key, value, "must be 1 or more", f"use {key}=1")


def _processes_remedy(key: str, product: int) -> str:
    return f"use parallel.processes={product} or a multiple, or another parallel.{key}"
