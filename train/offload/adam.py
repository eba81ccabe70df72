"""AdamW with its states on the host: fp32 masters and moments beside bf16 weights, 12 bytes a parameter that need not be on the GPU.

    optimizer = OffloadedAdam(model.parameters(), lr=3e-4, mode="stream")

`stream` brings the states to the GPU bucket by bucket, updates them there with torch's fused AdamW and sends them back, both directions
at once; what leaves last overlaps with whatever the GPU does next. `cpu_step` sends gradients down, runs the fused AdamW of the CPU
and sends fp32 weights up, where they are cast. `none` keeps everything on the GPU: the same class, to compare with. On CPU tensors all
modes work alike; only the streams are missing.

Gradients are `parameter.decoupled_grad` where it is set (Megatron-core's name for main gradients of another dtype), else `.grad`.
The host reads and writes states only after all copies have ended; whoever changes weights from outside calls `refresh_masters`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.profiler import record_function

from train.offload.layout import BUFFERS, Bucket, Piece, Slot, StateLayout, arrange, planned_bytes
from train.offload.memory import Lane, Slabs
from train.offload.parameters import by_group, check_group, given, gradient_of, one_device, part, with_gradient
from train.offload.places import NAMES, Buffer, Place, copy_bucket


class OffloadedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) over bf16 or fp32 parameters of one device, states where `mode` says.

    `fraction`: share of the states' bytes on the host. `bucket_elements`: parameters that move at once. `cpu_threads`: threads of the
    host's Adam (None: as torch is set; torchrun sets one). Memory is taken here, once; `planned_bytes` tells how much, and
    `close` gives it back. Raises ValueError for parameters and settings it cannot serve, MemoryError when the host lacks lockable memory.
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
        self.mode, self._cpu_threads = mode, cpu_threads
        self._device = one_device(self._weights)
        self._layout = arrange(sizes, mode, fraction, bucket_elements)
        self._allocate(self._layout)
        self.refresh_masters()

    def _allocate(self, layout: StateLayout) -> None:
        device = self._device
        self._slabs = Slabs(pinned=device.type == "cuda")

        def on_device(elements: int) -> Tensor:
            return torch.zeros(elements, device=device)

        self._resident = Place.make(0, layout.cut, layout.resident_masters_end, on_device)
        self._hosted = Place.make(layout.cut, layout.size, layout.host_masters_end, self._slabs.allocate)
        # The host's count of updates is the one that is kept; kernels on the GPU read a copy.
        self._steps = torch.zeros(len(self._weights))
        self._device_steps = self._steps.to(device)
        for weight, step in zip(self._weights, self._steps.unbind(), strict=True):
            self.state[weight] = {"step": step}
        count = min(BUFFERS, len(layout.offloaded))
        if layout.mode == "stream":
            masters = layout.host_masters_end > layout.cut
            self._buffers = [Buffer(layout.widest, masters, device) for _ in range(count)]
        elif layout.mode == "cpu_step":
            self._rising = [torch.empty(layout.widest, device=device) for _ in range(count)]
            self._falling = [self._slabs.allocate(layout.widest) for _ in range(count)]
            self._risen: list[torch.cuda.Event | None] = [None] * count
        self._up, self._down = Lane.new(device), Lane.new(device)
        # Buffers may be memory that earlier work on the caller's stream still uses.
        self._up.wait(Lane.current(device).record())
        self._settled: list[torch.cuda.Event | None] = [None] * len(layout.offloaded)

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
        self._steps += present
        if self._device.type == "cuda":
            self._device_steps.copy_(self._steps)
        else:
            self._device_steps = self._steps
        ready = Lane.current(self._device).record()
        for bucket in layout.resident:
            self._update(with_gradient(bucket, gradients), self._resident, gradients)
        moving = [number for number, bucket in enumerate(layout.offloaded) if with_gradient(bucket, gradients)]
        if layout.mode == "stream":
            self._step_streamed(layout, moving, gradients)
        elif layout.mode == "cpu_step":
            self._step_on_host(layout, moving, gradients, ready)
        return loss

    def _step_streamed(self, layout: StateLayout, moving: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        compute = Lane.current(self._device)
        for turn, number in enumerate(moving):
            bucket, buffer = layout.offloaded[number], self._buffers[turn % len(self._buffers)]
            place = buffer.holding(bucket, layout.host_masters_end)
            with record_function("offload.h2d"), self._up.after(buffer.free, self._settled[number]):
                copy_bucket(bucket, self._hosted, place)
            compute.wait(self._up.record())
            self._update(with_gradient(bucket, gradients), place, gradients)
            with record_function("offload.d2h"), self._down.after(compute.record()):
                copy_bucket(bucket, place, self._hosted)
            buffer.free = self._settled[number] = self._down.record()

    def _update(self, pieces: Sequence[Piece], place: Place, gradients: Sequence[Tensor | None]) -> None:
        """Fused AdamW on the device over states in `place`, then the weights from the masters."""
        masters, weights = [], []
        for group, members in by_group(pieces):
            updated, moments = [], []
            for piece in members:
                weight, master = self._weight(piece), place.of_piece("master", piece)
                updated.append(weight if master is None else master)
                moments.append((place.of_piece("exp_avg", piece), place.of_piece("exp_avg_sq", piece)))
                if master is not None:
                    masters.append(master)
                    weights.append(weight)
            self._fused(group, members, updated, moments, [part(gradients, piece) for piece in members], self._device_steps)
        if weights:
            torch._foreach_copy_(weights, masters)

    def _step_on_host(
        self, layout: StateLayout, moving: Sequence[int], gradients: Sequence[Tensor | None], ready: torch.cuda.Event | None
    ) -> None:
        compute = Lane.current(self._device)
        slots = len(self._rising)
        arrivals: list[torch.cuda.Event | None] = [None] * slots

        def send(turn: int) -> None:
            if turn < len(moving):
                arrivals[turn % slots] = self._send_gradients(layout.offloaded[moving[turn]], self._falling[turn % slots], gradients, ready)

        for turn in range(slots):
            send(turn)
        with _threads(self._cpu_threads):
            for turn, number in enumerate(moving):
                bucket, lane = layout.offloaded[number], turn % slots
                for event in (arrivals[lane], self._settled[number]):
                    if event is not None:
                        event.synchronize()
                with record_function("offload.host_adam"):
                    self._update_on_host(bucket, self._falling[lane], gradients)
                send(turn + slots)
                rising = self._rising[lane][: bucket.end - bucket.start]
                with record_function("offload.h2d"), self._up.after(self._risen[lane]):
                    rising.copy_(given(self._hosted.of("master", bucket.start, bucket.end)), non_blocking=True)
                self._settled[number] = self._up.record()
                compute.wait(self._settled[number])
                pieces = with_gradient(bucket, gradients)
                sources = [rising[piece.at - bucket.start :][: piece.end - piece.begin] for piece in pieces]
                torch._foreach_copy_([self._weight(piece) for piece in pieces], sources)
                self._risen[lane] = compute.record()

    def _send_gradients(
        self, bucket: Bucket, landing: Tensor, gradients: Sequence[Tensor | None], ready: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy a bucket's gradients to `landing` on the host, in fp32; returns the event of their arrival."""
        with record_function("offload.d2h"), self._down.after(ready):
            for piece in with_gradient(bucket, gradients):
                # A cast, where one is needed, happens on the device, in this lane: a copy across dtypes is far slower.
                target = landing[piece.at - bucket.start :][: piece.end - piece.begin]
                target.copy_(part(gradients, piece), non_blocking=True)
        return self._down.record()

    def _update_on_host(self, bucket: Bucket, landing: Tensor, gradients: Sequence[Tensor | None]) -> None:
        for group, members in by_group(with_gradient(bucket, gradients)):
            moments = [(self._hosted.of_piece("exp_avg", piece), self._hosted.of_piece("exp_avg_sq", piece)) for piece in members]
            masters = [given(self._hosted.of_piece("master", piece)) for piece in members]
            arrived = [landing[piece.at - bucket.start :][: piece.end - piece.begin] for piece in members]
            self._fused(group, members, masters, moments, arrived, self._steps)

    def _fused(
        self,
        group: int,
        members: Sequence[Piece],
        updated: list[Tensor],
        moments: list[tuple[Tensor | None, Tensor | None]],
        gradients: list[Tensor],
        steps: Tensor,
    ) -> None:
        settings = self.param_groups[group]
        torch._fused_adamw_(
            updated,
            gradients,
            [given(first) for first, _ in moments],
            [given(second) for _, second in moments],
            [],
            [steps[piece.slot.index] for piece in members],
            lr=float(settings["lr"]),
            beta1=settings["betas"][0],
            beta2=settings["betas"][1],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _weight(self, piece: Piece) -> Tensor:
        return self._weights[piece.slot.index].detach().view(-1)[piece.begin : piece.end]

    def synchronize(self) -> None:
        """Have the host wait until no copy of states is under way."""
        self._open()
        self._up.synchronize()
        self._down.synchronize()

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
        self.synchronize()
        chosen = None if parameters is None else {self._slot(parameter).index for parameter in parameters}
        # By pieces of buckets: the fp32 copy on the device that each cast makes stays small.
        for place, buckets in ((self._resident, layout.resident), (self._hosted, layout.offloaded)):
            for piece in (piece for bucket in buckets for piece in bucket.pieces):
                master = place.of_piece("master", piece)
                if master is not None and (chosen is None or piece.slot.index in chosen):
                    master.copy_(self._weight(piece).float())

    @torch.no_grad()
    def states_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Copies on the CPU of a parameter's `exp_avg`, `exp_avg_sq`, `step` and, where it is bf16, its fp32 `master`."""
        slot = self._slot(parameter)
        self.synchronize()
        states = {"step": self._steps[slot.index].clone()}
        parts = list(self._parts(slot))
        for name in NAMES if slot.low else NAMES[1:]:
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
        for name in ("_resident", "_hosted", "_buffers", "_rising", "_falling", "_risen", "_settled", "_steps", "_device_steps"):
            self.__dict__.pop(name, None)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
