"""Initial weights by parameter name: the same seed gives the same model in every parallel layout.

Megatron-core draws weights in construction order from per-stage seeds, so another pipeline split is another model. Here each
parameter is drawn whole from a generator seeded by (seed, global name) and the rank keeps its slice. Input projections and
embeddings are normal(0, init_std); projections back into the residual stream are scaled by 1/sqrt(2 * layers), as in GPT-2.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from train.config.schema import Config

_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight", "experts.w_out")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))


def _draw(shape: Sequence[int], std: float, seed: int, name: str) -> Tensor:
    return torch.empty(tuple(shape)).normal_(0.0, std, generator=_generator(seed, name))


def _tensor_slice(full: Tensor, dim: int, rank: int, world: int, gated: bool) -> Tensor:
    if not gated:
        return full.chunk(world, dim)[rank]
    # SwiGLU's first matrix is [gate; up]: a rank holds its part of each half.
    gate, up = full.chunk(2, dim)
    return torch.cat((gate.chunk(world, dim)[rank], up.chunk(world, dim)[rank]), dim)


def _expert_parameter(param: Tensor, name: str, std: float, seed: int, experts: Sequence[int]) -> Tensor:
    # (local experts, ...): an expert of the layer is drawn under its global number, whichever slot and site holds it.
    return torch.stack([_draw(param.shape[1:], std, seed, f"{name}.{expert}") for expert in experts])


def global_name(name: str, layer_numbers: dict[int, int]) -> str:
    """`name` of a parameter in a stage's module tree with the layer's global 0-based number in place of the local one."""
    parts = name.split(".")
    if "layers" in parts:
        at = parts.index("layers") + 1
        parts[at] = str(layer_numbers[int(parts[at])])
    return ".".join(parts)


def standard_deviation(name: str, config: Config) -> float:
    """Of the normal distribution that the matrix `name` is drawn from."""
    return config.model.init_std / (math.sqrt(2 * config.model.layers) if name.endswith(_RESIDUAL) else 1.0)


@torch.no_grad()
def initialize(model: Any, config: Config, groups: Any) -> None:
    """Draw all weights of a `LanguageModel` chunk in place. RMSNorm weights stay 1; an unknown 1-d parameter is an error."""
    numbers = {i: layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    tp_rank, tp = groups.tp.rank(), groups.tp.size()
    for local, param in model.named_parameters():
        name = global_name(local, numbers)
        if name.endswith("norm.weight"):
            continue
        if param.dim() < 2:
            raise RuntimeError(f"no initial value is defined for parameter {name} of shape {tuple(param.shape)}")
        std = standard_deviation(name, config)
        if config.model.tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"  # a copy on the last pipeline stage
        if ".experts." in name and ".shared_experts." not in name:
            experts = model.get_submodule(local.rpartition(".")[0]).global_experts
            value = _expert_parameter(param, name, std, config.train.seed, experts)
        elif getattr(param, "tensor_model_parallel", False):
            dim = param.partition_dim
            shape = list(param.shape)
            shape[dim] *= tp
            full = _draw(shape, std, config.train.seed, name)
            value = _tensor_slice(full, dim, tp_rank, tp, gated=name.endswith("linear_fc1.weight"))
        else:
            value = _draw(param.shape, std, config.train.seed, name)
        param.copy_(value.to(param.dtype))
