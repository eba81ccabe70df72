"""What both ways of offloading share: the device, the states on the host, the two lanes, and who updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from train.offload.exposure import Exposure
from train.offload.host_adam import Update, torch_adam
from train.offload.layout import Piece, StateLayout
from train.offload.memory import Lane
from train.offload.parameters import by_group, given, part
from train.offload.places import Place


@dataclass
class Traffic:
    """One optimiser's states on their way. `settled`: for each offloaded bucket, the event after which the host's memory is its own."""

    device: torch.device
    layout: StateLayout
    hosted: Place
    up: Lane
    down: Lane
    exposure: Exposure
    settled: list[torch.cuda.Event | None] = field(init=False)

    def __post_init__(self) -> None:
        self.settled = [None] * len(self.layout.offloaded)


class Updater:
    """AdamW over pieces of parameters whose states are in some place. `groups` gives the optimiser's own, asked at each update."""

    def __init__(self, weights: Sequence[Tensor], groups: Callable[[], list[dict[str, Any]]], steps: Tensor, device: torch.device) -> None:
        self._weights, self._groups, self._steps = weights, groups, steps
        # The host's count of updates is the one that is kept; kernels on the GPU read a copy.
        self._device_steps = steps.to(device)

    def count(self, present: Tensor) -> None:
        """Another update of the parameters that are `present`."""
        self._steps += present
        if self._device_steps.device.type == "cuda":
            self._device_steps.copy_(self._steps)
        else:
            self._device_steps = self._steps

    def weight(self, piece: Piece) -> Tensor:
        """The flat part of a parameter."""
        return self._weights[piece.slot.index].detach().view(-1)[piece.begin : piece.end]

    def on_device(self, pieces: Sequence[Piece], place: Place, gradients: Sequence[Tensor | None]) -> None:
        """Fused AdamW on the device over states in `place`, then the weights from the masters."""
        masters, weights = [], []
        for group, members in by_group(pieces):
            updated = []
            for piece in members:
                weight, master = self.weight(piece), place.of_piece("master", piece)
                updated.append(weight if master is None else master)
                if master is not None:
                    masters.append(master)
                    weights.append(weight)
            self._apply(torch_adam, group, members, updated, place, [part(gradients, piece) for piece in members], self._device_steps)
        if weights:
            torch._foreach_copy_(weights, masters)

    def on_host(self, pieces: Sequence[Piece], place: Place, gradients: Sequence[Tensor], update: Update) -> None:
        """`update` on the host over masters and moments in `place`, `gradients` of the pieces in fp32."""
        arrived = dict(zip((piece.at for piece in pieces), gradients, strict=True))
        for group, members in by_group(pieces):
            masters = [given(place.of_piece("master", piece)) for piece in members]
            self._apply(update, group, members, masters, place, [arrived[piece.at] for piece in members], self._steps)

    def _apply(
        self,
        update: Update,
        group: int,
        members: Sequence[Piece],
        updated: list[Tensor],
        place: Place,
        gradients: list[Tensor],
        steps: Tensor,
    ) -> None:
        first, second = ([given(place.of_piece(name, piece)) for piece in members] for name in ("exp_avg", "exp_avg_sq"))
        update(updated, gradients, first, second, [steps[piece.slot.index] for piece in members], self._groups()[group])
