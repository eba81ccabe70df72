"""AdamW with its states on the host: fp32 masters and moments beside bf16 weights, 12 bytes a parameter that need not be on the GPU.

    optimizer = OffloadedAdam(model.parameters(), lr=3e-4, mode="stream")

`stream` brings the states to the GPU bucket by bucket, updates them there with torch's fused AdamW and sends them back, both directions
at once; what leaves last overlaps with whatever the GPU does next, and `prefetch` has them arrive while backward still runs. `cpu_step`
sends gradients down, runs an AdamW on the CPU and sends fp32 weights up, where they are cast. `none` keeps everything on the GPU: the
same class, to compare with. On CPU tensors all modes work alike; only the streams are missing.

Gradients are `parameter.decoupled_grad` where it is set (Megatron-core's name for main gradients of another dtype), else `.grad`.
The host reads and writes states only after all copies have ended; whoever changes weights from outside calls `refresh_masters`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from train.offload.cpu_step import OnHost
from train.offload.exposure import Exposure
from train.offload.host_adam import host_adam
from train.offload.layout import Piece, Slot, StateLayout, arrange, planned_bytes
from train.offload.memory import Lane, Slabs, free_room
from train.offload.parameters import check_group, given, gradient_of, one_device, with_gradient
from train.offload.places import NAMES, Place
from train.offload.stream import Streamed
from train.offload.traffic import Traffic, Updater


class OffloadedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over bf16 or fp32 parameters of one device, states where `mode` says.

    `fraction`: share of the states' bytes on the host. `bucket_elements`: parameters that move at once. `cpu_adam`: the host's Adam, one
    of `train.offload.host_adam.CHOICES`, and `cpu_threads`: its threads (None: as torch is set; torchrun sets one). Memory is taken here,
    once; `planned_bytes` tells how much, and `close` gives it back. Raises ValueError for parameters and settings it cannot serve,
    MemoryError when the host lacks lockable memory.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        mode: str = "stream",
        fraction: float = 1.0,
        bucket_elements: int = 16 * 2**20,
        cpu_adam: str = "torch",
        cpu_threads: int | None = None,
    ) -> None:
        self._layout: StateLayout | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._weights = [parameter for group in self.param_groups for parameter in group["params"]]
        sizes = []
        for number, group in enumerate(self.param_groups):
            check_group(group)
            sizes += [(number, parameter.numel(), parameter.dtype == torch.bfloat16) for parameter in group["params"]]
        if cpu_threads is not None and cpu_threads < 1:
            raise ValueError(f"cpu_threads={cpu_threads}: must be 1 or more; leave it out for torch's own number")
        self.mode = mode
        self._device = one_device(self._weights)
        layout = arrange(sizes, mode, fraction, bucket_elements)
        update = host_adam(cpu_adam) if mode == "cpu_step" else None
        self._layout = layout
        self._allocate(layout)
        self._streamed = Streamed(self._traffic, self._updater) if mode == "stream" else None
        allocate = self._slabs.allocate
        self._on_host = None if update is None else OnHost(self._traffic, self._updater, update, cpu_threads, allocate)
        self.refresh_masters()

    def _allocate(self, layout: StateLayout) -> None:
        device = self._device
        self._slabs = Slabs(pinned=device.type == "cuda")

        def on_device(elements: int) -> Tensor:
            return torch.zeros(elements, device=device)

        self._resident = Place.make(0, layout.cut, layout.resident_masters_end, on_device)
        self._hosted = Place.make(layout.cut, layout.size, layout.host_masters_end, self._slabs.allocate)
        self._steps = torch.zeros(len(self._weights))
        for weight, step in zip(self._weights, self._steps.unbind(), strict=True):
            self.state[weight] = {"step": step}
        self._updater = Updater(self._weights, lambda: self.param_groups, self._steps, device)
        self._exposure = Exposure(device)
        self._traffic = Traffic(device, layout, self._hosted, Lane.new(device), Lane.new(device), self._exposure)
        # Buffers may be memory that earlier work on the caller's stream still uses.
        self._traffic.up.wait(Lane.current(device).record())

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Bytes beside weights and gradients: {"device": ..., "host": ...}, buffers included."""
        return planned_bytes(self._open())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only for torch's constructor: memory is laid out once. Raises ValueError afterwards."""
        if getattr(self, "_layout", None) is not None:
            raise ValueError("OffloadedAdam: groups cannot be added once memory is laid out; give all of them to the constructor")
        super().add_param_group(param_group)

    def _open(self) -> StateLayout:
        if self._layout is None:
            raise RuntimeError("OffloadedAdam: it was closed and its states are gone; make a new one")
        return self._layout

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; the others keep weight, states and count of steps."""
        layout = self._open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [gradient_of(weight) for weight in self._weights]
        present = torch.tensor([gradient is not None for gradient in gradients])
        if not bool(present.any()):
            return loss
        self._updater.count(present)
        self._exposure.begin()
        ready = Lane.current(self._device).record()
        with self._exposure.busy():
            for bucket in layout.resident:
                self._updater.on_device(with_gradient(bucket, gradients), self._resident, gradients)
        moving = [number for number, bucket in enumerate(layout.offloaded) if with_gradient(bucket, gradients)]
        if self._streamed is not None:
            self._streamed.step(moving, gradients)
        elif self._on_host is not None:
            self._on_host.step(moving, gradients, ready)
        self._exposure.end()
        return loss

    def prefetch(self, room: int | None = None) -> bool:
        """`stream`: begin to bring states for the coming step, as far as they fit; to be called while backward runs, as often as one likes.

        `room`: bytes that they may take now; None: what is free on the GPU, less a reserve. Returns whether a later call could bring more.
        The step is the same, bit for bit. States that came and were not used go with the step, or with `drop_prefetched`.
        """
        self._open()
        if self._streamed is None or self._streamed.complete:
            return False
        self._streamed.prefetch(free_room(self._device) if room is None else room)
        return not self._streamed.complete

    def drop_prefetched(self) -> None:
        """Give back the memory of states that came ahead of a step which is not taken."""
        self._open()
        if self._streamed is not None:
            self._streamed.drop()

    def exposed_seconds(self, wait: bool = False) -> float | None:
        """Mean seconds that a step since the last call waited for the host, see `train.offload.exposure`; None when there was none.

        `wait`: have the host wait for the end of the last step on the device, which else counts in the next call.
        """
        self._open()
        return self._exposure.take(wait)

    def synchronize(self) -> None:
        """Have the host wait until no copy of states is under way."""
        self._open()
        self._traffic.up.synchronize()
        self._traffic.down.synchronize()

    def _parts(self, slot: Slot) -> Iterator[tuple[Place, Piece]]:
        """The one or two places that hold a parameter's states."""
        layout = self._open()
        inside = min(max(layout.cut - slot.start, 0), slot.numel)
        if inside:
            yield self._resident, Piece(slot, 0, inside)
        if inside < slot.numel:
            yield self._hosted, Piece(slot, inside, slot.numel)

    @torch.no_grad()
    def refresh_masters(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Take weights as they are for the masters: after a checkpoint of weights only, an outer step, or any other outside write.

        `parameters`: those whose weights were written; None: all.
        """
        layout = self._open()
        self.drop_prefetched()
        self.synchronize()
        chosen = None if parameters is None else {self._slot(parameter).index for parameter in parameters}
        # By pieces of buckets: the fp32 copy on the device that each cast makes stays small.
        for place, buckets in ((self._resident, layout.resident), (self._hosted, layout.offloaded)):
            for piece in (piece for bucket in buckets for piece in bucket.pieces):
                master = place.of_piece("master", piece)
                if master is not None and (chosen is None or piece.slot.index in chosen):
                    master.copy_(self._updater.weight(piece).float())

    @torch.no_grad()
    def states_of(self, parameter: Tensor, names: Sequence[str] = NAMES) -> dict[str, Tensor]:
        """Copies on the CPU of a parameter's `exp_avg`, `exp_avg_sq`, `step` and, where it is bf16, its fp32 `master`.

        `names`: those that are wanted besides `step`.
        """
        slot = self._slot(parameter)
        self.synchronize()
        states = {"step": self._steps[slot.index].clone()}
        parts = list(self._parts(slot))
        for name in (name for name in (NAMES if slot.low else NAMES[1:]) if name in names):
            views = [given(place.of_piece(name, piece)).cpu() for place, piece in parts]
            states[name] = torch.cat(views or [torch.empty(0)]).view(parameter.shape)
        return states

    @torch.no_grad()
    def set_states_of(self, parameter: Tensor, states: dict[str, Any]) -> None:
        """Set any of a parameter's `step`, `exp_avg`, `exp_avg_sq` and, where it is bf16, `master`. The weight stays as it is."""
        slot = self._slot(parameter)
        names = [name for name in (NAMES if slot.low else NAMES[1:]) if name in states]
        for name in names:
            if states[name].numel() != slot.numel:
                raise ValueError(f"{name}: it has {states[name].numel()} elements and the parameter {slot.numel}; give its own state")
        self.drop_prefetched()
        self.synchronize()
        if "step" in states:
            self._steps[slot.index] = float(states["step"])
        for name in names:
            for place, piece in self._parts(slot):
                given(place.of_piece(name, piece)).copy_(states[name].reshape(-1)[piece.begin : piece.end])

    def _slot(self, parameter: Tensor) -> Slot:
        for slot in self._open().slots:
            if self._weights[slot.index] is parameter:
                return slot
        raise ValueError(f"a tensor of shape {tuple(parameter.shape)} is not among the parameters; give one of param_groups")

    def state_dict(self) -> dict[str, Any]:
        """torch's form, the same in all modes: `state` by number (copies of `states_of`) and `param_groups`."""
        states = {number: self.states_of(weight) for number, weight in enumerate(self._weights)}
        groups, number = [], 0
        for group in self.param_groups:
            count = len(group["params"])
            packed = {key: value for key, value in group.items() if key != "params"}
            groups.append({**packed, "params": list(range(number, number + count))})
            number += count
        return {"state": states, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states and groups of `state_dict()`, of any mode, or of torch's AdamW. Load the model's weights first.

        A parameter without a state starts anew; one without a master takes its weight for it. Raises ValueError when groups differ.
        """
        groups = state_dict["param_groups"]
        sizes, wanted = [len(group["params"]) for group in groups], [len(group["params"]) for group in self.param_groups]
        if sizes != wanted:
            raise ValueError(f"param_groups: they hold {sizes} parameters there and {wanted} here; use the optimiser of the same model")
        for group in groups:
            check_group({**group, "params": ()})
        self.refresh_masters()
        numbers = [number for group in groups for number in group["params"]]
        for weight, number in zip(self._weights, numbers, strict=True):
            fresh = {"step": 0.0, **{name: torch.zeros(weight.shape) for name in NAMES[1:]}}
            self.set_states_of(weight, {**fresh, **state_dict["state"].get(number, {})})
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    def close(self) -> None:
        """Wait for all copies and free the memory. A second call does nothing; any other use afterwards raises RuntimeError."""
        if self._layout is None:
            return
        self.synchronize()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._slabs.release()
        self._layout = None
        self.state.clear()
        for name in ("_resident", "_hosted", "_steps", "_updater", "_traffic", "_exposure", "_streamed", "_on_host"):
            self.__dict__.pop(name, None)
