"""Megatron-core on a machine without a GPU: the one place that answers its CUDA calls for the CPU.

Core is written for CUDA. With gloo and CPU tensors everything we use of it runs, apart from three kinds of hard-wired
calls, bridged here and only when no GPU is present:

1. queries and synchronisation of `torch.cuda` (current device, streams, events, random state);
2. tensors created with a literal `device="cuda"`, or moved there with `.cuda()`;
3. a few points inside core that ask whether a tensor is on a GPU.

`install()` is idempotent. It must run before the first process group, in every process that trains on the CPU.
"""

import contextlib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

_CPU = torch.device("cpu")

# Modules that build tensors with a literal device="cuda". Their global `torch` is rebound to a view of torch whose
# factories read that as the CPU, so that nothing else in the process sees a changed torch.
_LITERAL_CUDA = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.tensor_parallel.data",
    "megatron.core.transformer.utils",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like", "randn", "rand")


class _Stream:
    """A CPU 'stream': work is already in order, so waiting is a no-op."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, _other: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _Event()

    def query(self) -> bool:
        return True


class _Event:
    """A CPU 'event': everything before it has happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def record(self, *_args: Any) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CpuTorch(ModuleType):
    """`torch` as core's modules see it: the same, but `device="cuda"` in a factory means the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


def _stay(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


def _legacy_type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    # Core compares `tensor.type()` with 'torch.cuda.FloatTensor' to group main parameters by kind.
    name = _TENSOR_TYPE(tensor, dtype, *args, **kwargs) if dtype is not None else _TENSOR_TYPE(tensor)
    return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) and tensor.device == _CPU else name


_TENSOR_TYPE = torch.Tensor.type


def _patch_torch_cuda() -> None:
    stream = _Stream()
    replacements: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _stream=None: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Event,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = replacements["get_rng_state"]
    torch.cuda.nvtx.range_push = lambda *_: 0
    torch.cuda.nvtx.range_pop = lambda: 0
    torch.Tensor.cuda = _stay  # type: ignore[assignment]
    torch.Tensor.type = _legacy_type  # type: ignore[assignment]


def _patch_core() -> None:
    view = _CpuTorch()
    for name in _LITERAL_CUDA:
        importlib.import_module(name).torch = view  # type: ignore[attr-defined]

    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # Dropout and init randomness come from the CPU generator; core would set a CUDA generator's state.
    random._get_cuda_rng_state = lambda *_a, **_k: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *_a, **_k: torch.set_rng_state(state)  # type: ignore[attr-defined]

    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    original = dispatcher.maybe_move_tensor_to_cpu

    def as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # Core converts split sizes to lists only when they are CUDA tensors; gloo's all-to-all needs lists as well.
        if torch.is_tensor(tensor) and as_numpy:
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    dispatcher.maybe_move_tensor_to_cpu = as_numpy  # type: ignore[attr-defined]


_installed = False


def install() -> None:
    """Bridge core to the CPU. Raises RuntimeError on a machine with a GPU, where nothing needs bridging."""
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("train.engine.cpu.install() was called on a machine with a GPU; Megatron-core runs there as it is")
    _patch_torch_cuda()
    _patch_core()
    _installed = True
