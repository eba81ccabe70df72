"""The engine at a size for tests: a small model, made-up packed rows, steps, and the whole state put together from all ranks.

Runs inside a rank of a pool (`ranks(n).run(job, ...)`); only `small_config`, `assemble` and the types also serve outside. The
rows of a step are a function of their number alone, so every layout sees the same ones.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe.config import MoeConfig
from train.config.schema import Config, TrainConfig
from train.data.dataset import Batch
from train.engine.layout import ParallelLayout
from train.model.config import AttentionConfig, ModelConfig
from train.optim import OptimConfig

VOCABULARY = 120

MOE: dict[str, Any] = {
    "moe.experts": 4,
    "moe.top_k": 2,
    "moe.layers": "every:2",
    "moe.ffn_width": 48,
    "moe.aux_coef": 0.02,
    "moe.z_coef": 1e-3,
}
"""Changes to `small_config` that make every second block a Mixture of Experts with both of the router's losses."""


def small_config(changes: Mapping[str, Any] | None = None) -> Config:
    """Four blocks of width 64 in fp32 with S2 attention of six blocks a row; `changes` maps `section.key` to a value."""
    config = Config(
        train=TrainConfig(steps=8, seq_len=96, micro_batch=2, global_batch=8, seed=7, precision="fp32", timeout=120.0),
        model=ModelConfig(layers=4, width=64, ffn_width=96, heads=4, kv_heads=2, head_dim=16, vocab_size=VOCABULARY),
        attention=AttentionConfig(kind="s2", block_size=16, local_blocks=1, stride=2, dense_layers=[0]),
        moe=MoeConfig(),
        # Epsilon above fp32 noise: Adam would otherwise blow up the last bits of vanishing gradients to full steps.
        optim=OptimConfig(lr=2e-3, eps=1e-5, clip=1.0, schedule="constant"),
    )
    for key, value in (changes or {}).items():
        section, name = key.split(".")
        part = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: part})
    return config


@dataclass
class Engine:
    """What one rank holds of a run."""

    config: Config
    ranks: Any
    micro_batches: int
    chunks: list[Any]
    optimizer: Any


def build(config: Config, load: str | None = None) -> Engine:
    """Groups, model and optimiser of `config` on this rank; the state of the checkpoint `load` when given."""
    from train.engine import build as engine_build
    from train.engine import checkpoint, parallel

    rank = parallel.init_process_group(120.0)
    layout = ParallelLayout.build(config, dist.get_world_size())
    ranks = parallel.build_ranks(config, rank)
    chunks = engine_build.build_model(config, ranks)
    engine = Engine(config, ranks, layout.micro_batches(config), chunks, engine_build.build_optimizer(config, ranks, chunks))
    if load is not None:
        checkpoint.load(Path(load), engine.chunks, engine.optimizer)
    return engine


def make_rows(numbers: Sequence[int], seq_len: int, vocabulary: int = VOCABULARY) -> Batch:
    """Packed rows: cut into one to four documents, a few targets masked besides each document's last; two tokens in three repeat."""
    tokens, masks, positions, bounds = [], [], [], [0]
    for place, number in enumerate(numbers):
        generator = torch.Generator().manual_seed(1000 + number)
        text = torch.randint(0, vocabulary, (seq_len + 1,), generator=generator)
        text[1::3] = text[0:-1:3][: len(text[1::3])]
        cuts = torch.randperm(seq_len - 1, generator=generator)[: number % 4] + 1
        edges = [0, *sorted(cuts.tolist()), seq_len]
        mask = (torch.rand(seq_len, generator=generator) > 0.1 + 0.1 * (number % 3)).float()
        mask[[edge - 1 for edge in edges[1:-1]]] = 0.0
        tokens.append(text)
        masks.append(mask)
        positions.append(torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(edges)]))
        bounds += [place * seq_len + edge for edge in edges[1:]]
    text = torch.stack(tokens)
    mask = torch.stack(masks)
    return Batch(
        tokens=text[:, :-1].contiguous(),
        targets=text[:, 1:].contiguous(),
        loss_mask=mask,
        positions=torch.stack(positions),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        sample_ids=list(numbers),
        target_bytes=float(mask.sum()),
    )


def micro_batches(engine: Engine, step: int) -> list[Batch]:
    """This rank's micro-batches of a step: its contiguous share of the global batch, as the loop takes it."""
    train = engine.config.train
    size = train.micro_batch
    first = step * train.global_batch + engine.ranks.dp_rank * engine.micro_batches * size
    vocabulary = int(engine.config.model.vocab_size or 0)
    return [make_rows(range(first + k * size, first + (k + 1) * size), train.seq_len, vocabulary) for k in range(engine.micro_batches)]


def take_step(engine: Engine, step: int, lr: float | None = None) -> Any:
    """One optimiser step on the rows of `step`; the engine's StepResult."""
    from train.engine.step import train_step

    batches = micro_batches(engine, step)

    def iterate() -> Iterator[Batch]:
        return iter(batches)

    train = engine.config.train
    return train_step(
        engine.chunks, engine.optimizer, iterate, engine.ranks,
        micro_batches=engine.micro_batches, rows=train.micro_batch, seq_len=train.seq_len, lr=engine.config.optim.lr if lr is None else lr,
    )  # fmt: skip


def gradients(engine: Engine, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """Main gradients by parameter name after a forward and backward of this rank's `batches`, as the optimiser would find them.

    Whole only without the distributed optimiser, which leaves each rank its shard.
    """
    from train.engine.step import run_micro_batches

    train = engine.config.train
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    run_micro_batches(
        engine.chunks, lambda: iter(batches), engine.ranks, len(batches), batches[0].tokens.shape[0], train.seq_len, train=True
    )
    return {name: parameter.main_grad.clone() for name, parameter in names(engine)}


def names(engine: Engine) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters with the layers' global numbers in their names."""
    from train.engine.checkpoint import unwrap
    from train.engine.init import global_name

    for chunk in engine.chunks:
        model = unwrap(chunk)
        numbers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
        for name, parameter in model.named_parameters():
            yield global_name(name, numbers), parameter


@dataclass
class Piece:
    """A part of a stored tensor: what this rank holds of `name`, at `offset` of a tensor of `shape`."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: torch.Tensor


def pieces(engine: Engine, optimizer: bool = True) -> list[Piece]:
    """This rank's parts of the weights and, with `optimizer`, of masters and moments, as a checkpoint would store them; on the CPU."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    from train.engine.checkpoint import sharded_state

    state = sharded_state(engine.chunks, engine.optimizer if optimizer else None, loading=False)
    state.pop("random", None)
    apply_factories(state)
    found = []
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None:
            data = value.data.detach().cpu().clone().reshape((1,) * value.prepend_axis_num + tuple(value.local_shape))
            found.append(Piece(value.key, tuple(value.global_shape), tuple(value.global_offset), data))
    return found


def assemble(by_rank: Sequence[Sequence[Piece]]) -> dict[str, torch.Tensor]:
    """The whole tensors by name. Parts that several ranks hold must be the same bits, and nothing may be missing."""
    whole: dict[str, torch.Tensor] = {}
    filled: dict[str, torch.Tensor] = {}
    for rank, parts in enumerate(by_rank):
        for piece in parts:
            if piece.name not in whole:
                whole[piece.name] = torch.zeros(piece.shape, dtype=piece.data.dtype)
                filled[piece.name] = torch.zeros(piece.shape, dtype=torch.bool)
            at = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.data.shape, strict=True))
            seen = filled[piece.name][at]
            same = torch.where(seen, whole[piece.name][at] == piece.data, True)
            assert bool(same.all()), f"{piece.name}: rank {rank} holds other values than the ranks before it"
            whole[piece.name][at] = piece.data
            filled[piece.name][at] = True
    holes = [name for name, seen in filled.items() if not bool(seen.all())]
    assert not holes, f"no rank holds all of {holes}"
    return whole
