"""Experts that a site has and does not train (`moe.mode=frozen`) keep every bit while the optimiser steps.

Their gradients are zero, yet weight decay and momentum that a checkpoint brought along would move them. An optimiser knows stacks of
experts, or flat shards of such stacks, not rows that stand still. So what it steps from is noted before the step and put back after
it, before the model's weights are made from it: the same on whole weights, fp32 masters, shards and host memory.
"""

from typing import Any

import torch
from torch import Tensor

from train.engine.masters import Master, masters
from train.engine.optimizer_state import parts, weights


def hold_frozen(chunks: list[Any], optimizer: Any) -> None:
    """Make each step of core's chained `optimizer` leave the frozen experts of `chunks` as they are."""
    modules = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "frozen_slots")]
    stacks = {id(weight): module for module in modules for weight in module.parameters()}
    held = [(master, stacks[id(master.weight)]) for master in masters(chunks, optimizer) if id(master.weight) in stacks]
    for _, part in parts(optimizer):
        own = {id(weight) for weight, _ in weights(part)}
        mine = [(master, stack) for master, stack in held if id(master.weight) in own]
        if mine:
            _Hold(mine).watch(part.optimizer)


class _Hold:
    """Stands around the steps of one inner optimiser; `held`: what it steps from, and the experts that this belongs to."""

    def __init__(self, held: list[tuple[Master, Any]]) -> None:
        self._held = held
        self._before: list[list[tuple[slice, Tensor]]] = []

    def watch(self, adam: torch.optim.Optimizer) -> None:
        adam.register_step_pre_hook(self._note)
        adam.register_step_post_hook(self._put_back)

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        self._before = []
        for master, stack in self._held:
            now = master.read()
            self._before.append([(place, now[place].clone()) for place in _ranges(master, stack.frozen_slots)])

    @torch.no_grad()
    def _put_back(self, *_: Any) -> None:
        for (master, _stack), before in zip(self._held, self._before, strict=True):
            if before:
                now = master.read().clone()
                for place, values in before:
                    now[place] = values
                master.write(now)
        self._before = []


def _ranges(master: Master, slots: tuple[int, ...]) -> list[slice]:
    """Where the elements of the experts in `slots` lie in what `master` reads."""
    size = master.weight[0].numel()
    pieces = [slice(max(slot * size - master.start, 0), min((slot + 1) * size, master.end) - master.start) for slot in slots]
    return [piece for piece in pieces if piece.start < piece.stop]
