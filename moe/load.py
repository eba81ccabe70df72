"""What the routers of a model do: load of each expert before skipping, assignments skipped, tokens that no expert here serves.

Counted on the device, without waiting for it, and summed over ranks when they are asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .megatron import SiteRouter
from .monitor import load_entropy

_KEPT, _SKIPPED, _NONE, _TOKENS = range(4)


@dataclass(frozen=True)
class LayerLoad:
    """Counts of one layer."""

    load: Tensor
    """Assignments of each expert before skipping, (E,) int64, by global number."""
    kept: int
    """Assignments computed."""
    skipped: int
    """Assignments dropped because their expert is elsewhere."""
    none_resident: int
    """Tokens without any resident expert."""
    tokens: int
    """Tokens routed."""

    @property
    def entropy(self) -> float:
        """See `moe.monitor.load_entropy`."""
        return load_entropy(self.load)

    @property
    def max_load(self) -> float:
        """Load of the busiest expert over the mean: 1 when all are used alike, E when one has everything."""
        return float(self.load.max()) * self.load.numel() / float(self.load.sum())

    def figures(self) -> dict[str, float]:
        """What a metrics line says of the layer."""
        assignments = self.kept + self.skipped
        return {
            "entropy": self.entropy,
            "max_load": self.max_load,
            "skip_rate": self.skipped / max(assignments, 1),
            "none_resident": self.none_resident / max(self.tokens, 1),
        }


class ExpertLoad:
    """Counts what the routers of some modules do.

        load = ExpertLoad(chunks, num_layers, num_experts)
        ...a training step...
        load.collect(group)            # {layer number: LayerLoad}, since the last collect

    Each assignment of a training forward pass counts once: evaluation does not count, nor does the first of the two forward
    passes of a recomputed layer. Layers carry core's 1-based global numbers.
    """

    def __init__(self, modules: Iterable[nn.Module], num_layers: int, num_experts: int) -> None:
        modules = list(modules)
        device = next(parameter.device for module in modules for parameter in module.parameters())
        self._experts = num_experts
        self._counts = torch.zeros(num_layers, num_experts + 4, dtype=torch.int64, device=device)
        self._routers = [router for module in modules for router in module.modules() if isinstance(router, SiteRouter)]
        for router in self._routers:
            router.listeners.append(self._count)

    def _count(self, layer: int, load: Tensor, kept: Tensor | None, tokens: int) -> None:
        row = self._counts[layer - 1]
        row[: self._experts] += load
        figures = row[self._experts :]
        figures[_TOKENS] += tokens
        if kept is None:
            figures[_KEPT] += load.sum()
            return
        of_token = kept.sum(1)
        computed = of_token.sum()
        figures[_KEPT] += computed
        figures[_SKIPPED] += load.sum() - computed
        figures[_NONE] += (of_token == 0).sum()

    def collect(self, group: dist.ProcessGroup | None = None) -> dict[int, LayerLoad]:
        """Counts of the layers that saw tokens, and start again at zero.

        With `group` they are summed over it and cover the layers of all its ranks; every rank of it must call. The routers of
        any two ranks see different tokens (tensor parallelism with experts needs sequence parallelism), so the group of all
        ranks gives the totals. Without `group`, this rank's own. Waits for the device.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        if group is not None:
            dist.all_reduce(counts, group=group)
        host = counts.cpu()
        return {
            row + 1: LayerLoad(host[row, : self._experts], *host[row, self._experts :].tolist())
            for row in range(host.shape[0])
            if host[row, self._experts + _TOKENS]
        }

    def figures(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """`collect` as a metrics line has it: each expert's share and the routing by 0-based layer; over all layers the mean entropy of
        the load, the busiest expert's over the mean, and the shares of assignments skipped and of tokens without any resident expert."""
        layers = self.collect(group)
        assignments = sum(layer.kept + layer.skipped for layer in layers.values())
        tokens = sum(layer.tokens for layer in layers.values())
        return {
            "expert_load": {str(number - 1): (layer.load / layer.load.sum()).tolist() for number, layer in layers.items()},
            "layer_routing": {str(number - 1): layer.figures() for number, layer in layers.items()},
            "expert_max_load": max((layer.max_load for layer in layers.values()), default=1.0),
            "expert_entropy": sum(layer.entropy for layer in layers.values()) / max(len(layers), 1),
            "skip_rate": sum(layer.skipped for layer in layers.values()) / max(assignments, 1),
            "none_resident": sum(layer.none_resident for layer in layers.values()) / max(tokens, 1),
        }

    def close(self) -> None:
        """Stop counting."""
        for router in self._routers:
            router.listeners.remove(self._count)
