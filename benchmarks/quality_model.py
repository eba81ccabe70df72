"""A small Mixture-of-Experts language model in plain torch with the layer of `moe.skip`, and a site that trains it. For `quality.py`.

Sites are objects of one process: they train one after the other and meet as threads (`moe.exchange.Hub`). Weights are fp32 (TF32
products on a GPU), drawn once for the whole model, so that all sites and arms begin from the same. A row is attended to as one text.

Dims: b rows, s tokens, h width, E experts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.exchange import Exchange
from moe.monitor import Snapshot
from moe.outer import Named, OuterStep
from moe.residency import ResidencyPlan
from moe.skip import Gate, Mode, Router, SkipMoE, SkipStats, StackedExperts

VOCABULARY = 257
"""Bytes and the end of a document."""


@dataclass(frozen=True)
class Size:
    """What the model is."""

    layers: int
    width: int
    heads: int
    inner: int
    """Inner width of an expert."""
    experts: int = 8
    top_k: int = 2
    seq_len: int = 512


class Block(nn.Module):
    """Pre-norm attention over all earlier tokens of the row, then experts."""

    def __init__(self, size: Size, held: int) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_a, self.norm_b = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width, bias=False), nn.Linear(size.width, size.width, bias=False)
        self.moe = SkipMoE(Router(size.width, size.experts, size.top_k), StackedExperts(held, size.width, size.inner))

    def forward(self, x: Tensor, resident: Sequence[int], mode: Mode, gate: Gate) -> tuple[Tensor, SkipStats]:
        b, s, width = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, width))
        y, stats = self.moe(self.norm_b(x).flatten(0, 1), resident, mode, gate)
        return x + y.view_as(x), stats


class Model(nn.Module):
    """Embedding with learnt positions, blocks, norm, head."""

    def __init__(self, size: Size, held: Sequence[int]) -> None:
        """`held`: experts that each block has."""
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, size.width), nn.Embedding(size.seq_len, size.width)
        self.blocks = nn.ModuleList(Block(size, count) for count in held)
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, residents: Sequence[Sequence[int]], mode: Mode, gate: Gate) -> tuple[Tensor, list[SkipStats]]:
        """tokens (b, s) -> logits (b, s, v) and what each block's router did; `residents`: the experts that count as held, by block."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        everything = []
        for block, resident in zip(self.blocks, residents, strict=True):
            x, stats = block(x, resident, mode, gate)
            everything.append(stats)
        return self.head(self.norm(x)), everything


def whole_model(size: Size, seed: int) -> Model:
    """The model with all experts, on the CPU, drawn from `seed`."""
    torch.manual_seed(seed)
    model = Model(size, [size.experts] * size.layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and ".moe." not in name:
            std = 0.02 / math.sqrt(2 * size.layers) if name.endswith("out.weight") else 0.02
            nn.init.normal_(parameter, std=std)
    return model


def masked_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy in nats over the tokens whose `mask` (b, s) is 1."""
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum().clamp(min=1)


@dataclass
class Counts:
    """What the routers of a site did since the last round, by block."""

    load: list[Tensor] = field(default_factory=list)
    skipped: int = 0
    assignments: int = 0
    losses: list[float] = field(default_factory=list)


class Site:
    """One site: its slice of the model, its optimiser and its outer step."""

    def __init__(self, whole: Model, size: Size, plan: ResidencyPlan, exchange: Exchange, settings: Any, device: torch.device) -> None:
        """`settings`: mode, gate, outer_lr, outer_momentum, aux, router_rows (`quality.Arm`)."""
        self.number, self._size, self._plan, self._settings, self._device = exchange.site, size, plan, settings, device
        self.residents = [plan.resident(self.number, layer) for layer in range(size.layers)]
        self._everything = settings.mode in ("full", "frozen")
        held = [tuple(range(size.experts)) if self._everything else resident for resident in self.residents]
        self.model = Model(size, [len(experts) for experts in held])
        state = whole.state_dict()
        for layer, experts in enumerate(held):
            for name in ("w_in", "w_out"):
                key = f"blocks.{layer}.moe.experts.{name}"
                state[key] = state[key][list(experts)]
        self.model.load_state_dict(state)
        self.model.to(device)
        decayed = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        rest = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.named, self._weights = self._named(held)
        self.outer = OuterStep(self.named, plan, exchange, settings.outer_lr, settings.outer_momentum, router_rows=settings.router_rows)
        self.counts = Counts()

    def _named(self, held: Sequence[Sequence[int]]) -> tuple[dict[str, Named], dict[str, float] | None]:
        """Parameters by name; in mode frozen an expert counts as dense, with the weights of those that do not train it at 0."""
        named: dict[str, Named] = {}
        weights: dict[str, float] = {}
        frozen = self._settings.mode == "frozen"
        for name, parameter in self.model.named_parameters():
            words = name.split(".")
            layer = int(words[1]) if words[0] == "blocks" else None
            if layer is not None and ".router." in name:
                for expert in range(self._size.experts):
                    named[f"{name}.{expert}"] = Named(parameter.data[expert], "router_row", layer, expert)
            elif layer is not None and ".experts." in name:
                for slot, expert in enumerate(held[layer]):
                    place = f"{name}.{expert}"
                    named[place] = Named(parameter.data[slot], "dense") if frozen else Named(parameter.data[slot], "expert", layer, expert)
                    weights[place] = float(expert in self.residents[layer])
            else:
                named[name] = Named(parameter.data, "dense")
        return named, ({name: weights.get(name, 1.0) for name in named} if frozen else None)

    def train(self, tokens: Tensor, targets: Tensor, mask: Tensor, lr: float) -> None:
        """One local step on rows (b, s)."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        logits, stats = self.model(tokens, self._counting(), self._settings.mode, self._settings.gate)
        loss = masked_loss(logits, targets, mask)
        (loss + self._settings.aux * torch.stack([each.aux_loss for each in stats]).mean()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        kept = self._foreign()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        self._count(stats, loss)

    def _counting(self) -> Sequence[Sequence[int]]:
        """The residents as the layer takes them: all of them in mode full."""
        return [range(self._size.experts)] * self._size.layers if self._settings.mode == "full" else self.residents

    def _foreign(self) -> list[tuple[Tensor, Tensor]]:
        """In mode frozen the experts of others and their values: weight decay would move them in spite of zero gradients."""
        if self._settings.mode != "frozen":
            return []
        assert self._weights is not None
        return [(self.named[name].tensor, self.named[name].tensor.clone()) for name, weight in self._weights.items() if not weight]

    @torch.no_grad()
    def _count(self, stats: Sequence[SkipStats], loss: Tensor) -> None:
        loads = [each.load.cpu() for each in stats]
        self.counts.load = [a + b for a, b in zip(self.counts.load, loads, strict=True)] if self.counts.load else loads
        self.counts.skipped += sum(int(each.skipped) for each in stats)
        self.counts.assignments += sum(int(load.sum()) for load in loads)
        self.counts.losses.append(float(loss))

    def meet(self) -> None:
        """The outer step; to be called by all sites at once, each in a thread."""
        self.outer.step(weights=self._weights)

    @torch.no_grad()
    def loss(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> float:
        """Mean validation loss of this site's slice, in the mode that it trains in."""
        return mean_loss(self.model, batches, self._counting(), self._settings.mode, self._settings.gate)

    @torch.no_grad()
    def snapshot(self, tokens: Tensor) -> Snapshot:
        """What the routers choose on `tokens` (b, s), before skipping."""
        chosen: dict[int, Tensor] = {}
        handles = [
            block.moe.router.register_forward_hook(
                lambda router, _, logits, layer=layer: chosen.update({layer: self._choose(router, logits, layer)})
            )
            for layer, block in enumerate(self.model.blocks)
        ]
        self.model(tokens, self._counting(), self._settings.mode, self._settings.gate)
        for handle in handles:
            handle.remove()
        return Snapshot(chosen, {layer: block.moe.router.weight.detach().cpu().clone() for layer, block in enumerate(self.model.blocks)})

    def _choose(self, router: Router, logits: Tensor, layer: int) -> Tensor:
        if self._settings.mode == "mask":
            here = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            here[list(self.residents[layer])] = True
            logits = logits.masked_fill(~here, -torch.inf)
        indices = (logits + router.bias).topk(router.top_k, dim=-1).indices
        return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, indices, True).cpu()


def mean_loss(
    model: Model, batches: Iterable[tuple[Tensor, Tensor, Tensor]], residents: Sequence[Sequence[int]], mode: Mode, gate: Gate
) -> float:
    """Mean loss over the valid tokens of all batches."""
    total = count = 0.0
    for tokens, targets, mask in batches:
        valid = float(mask.sum())
        total += float(masked_loss(model(tokens, residents, mode, gate)[0], targets, mask)) * valid
        count += valid
    return total / count


@torch.no_grad()
def merge(whole: Model, sites: Sequence[Site], plan: ResidencyPlan, size: Size, device: torch.device) -> Model:
    """The model with every expert, right after an outer step: dense parameters of any site, an expert and its row of its first holder."""
    model = Model(size, [size.experts] * size.layers).to(device)
    model.load_state_dict(whole.state_dict())
    for name, parameter in model.named_parameters():
        if name in sites[0].named:
            parameter.copy_(sites[0].named[name].tensor)
            continue
        layer = int(name.split(".")[1])
        for expert in range(size.experts):
            parameter[expert].copy_(sites[plan.holders(expert, layer)[0]].named[f"{name}.{expert}"].tensor)
    return model
