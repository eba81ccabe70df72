"""One rank of a pool: `python rank_worker.py <connection fd> <rank> <world> <store file>`; started by `ranks.RankPool` only.

`python rank_worker.py fork <socket fd>` imports what the ranks need once and then forks a rank for each request, in milliseconds
instead of ten seconds of imports. A request is a JSON object, with the rank's connection and log as descriptors beside a "start":
    {"start": rank, "world": n, "store": path, "environment": {...}}  ->  {"pid": ...}
    {"wait": pid, "seconds": s}                                       ->  {"code": exit code, -signal, or null while it runs}

Joins a process group of the pool's size once (gloo, and NCCL beside it where it sees GPUs), then runs the functions it is sent, one
after another. A function is picked by the file that defines it and its name, because test modules have no package that could be imported.

Messages from the pool: (module, file, name), pickled, then the arguments. Answer: (ok, value or traceback). Both through
`torch.save`: plain pickles of tensors name a function of Megatron-core once it is loaded, and the reader would import it.
"""

import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[2]
_cleanups: list[Callable[[], None]] = []


def at_job_end(cleanup: Callable[[], None]) -> None:
    """Have `cleanup` called after every later job of this worker (call it inside a job; the same function counts once)."""
    if cleanup not in _cleanups:
        _cleanups.append(cleanup)


def load_function(module: str, file: str, name: str) -> Callable[..., Any]:
    """The top-level function `name` of `file`, loaded once under the name `module` so that its classes pickle both ways."""
    loaded = sys.modules.get(module)
    if loaded is None or not _same_file(loaded, file):
        if Path(file).is_relative_to(_REPOSITORY / "tests"):
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[module] = loaded
            try:
                spec.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[module]
                raise
        else:
            loaded = importlib.import_module(module)
    function: Callable[..., Any] = getattr(loaded, name)
    return function


def _same_file(module: Any, file: str) -> bool:
    return getattr(module, "__file__", None) is not None and os.path.realpath(module.__file__) == os.path.realpath(file)


def reset() -> None:
    """Leave nothing of one job to the next: groups, core's globals, random state, autograd mode, garbage."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        # NCCL's groups end together: nobody may leave one in which another still works.
        torch.cuda.synchronize()
        dist.all_reduce(torch.zeros(1))
    for cleanup in _cleanups:
        cleanup()
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None:
        state.destroy_model_parallel()
        scaler = sys.modules.get("megatron.core.transformer.moe.moe_utils")
        if scaler is not None:
            scaler.MoEAuxLossAutoScaler.main_loss_backward_scale = None
        tracker = sys.modules.get("megatron.core.transformer.moe.moe_logging")
        if tracker is not None:
            tracker.destroy_moe_metrics_tracker()
    _let_go_of_models()
    # Core forgets its groups without closing them; each one keeps threads and sockets until it is destroyed.
    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    gc.freeze()  # what is left are modules, mostly: half a million objects that each later collection would walk for half a second
    seed_all()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def _let_go_of_models() -> None:
    """Break the cycles of core's data-parallel wrappers, which run through autograd nodes and their hooks, where no collector sees them.

    A model that stays holds its twenty groups, and each of these three threads, one of which wakes a hundred times a second.
    """
    wrappers = sys.modules.get("megatron.core.distributed.distributed_data_parallel")
    if wrappers is None:
        return
    for wrapper in [thing for thing in gc.get_objects() if type(thing) is wrappers.DistributedDataParallel]:
        if "_modules" not in wrapper.__dict__:  # emptied after an earlier job, and still held by an exception's frames
            continue
        for module in list(wrapper.modules()):
            module.__dict__.clear()


def seed_all() -> None:
    """The state of every generator at the start of a job."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def _end_with_parent(parent: int) -> None:
    # A pool whose pytest was killed must not leave ranks that wait for each other.
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def pack(value: Any) -> bytes:
    """`value` for the other side of the connection."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What the other side packed; only ever read from a process that this test session started."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def serve(connection: Connection, rank: int, world: int, store: str) -> None:
    """Serve jobs until the pool closes the connection."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=600))
    dist.barrier()
    connection.send_bytes(pack((True, "ready")))
    while True:
        try:
            module, file, name = pickle.loads(connection.recv_bytes())
            payload = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(_run(module, file, name, payload))
    # Leaving without destroying the group: ranks that still close sockets to each other may take seconds.
    sys.stdout.flush()
    os._exit(0)


def _run(module: str, file: str, name: str, payload: bytes) -> bytes:
    import torch

    seed_all()
    try:
        function = load_function(module, file, name)
        result = function(*unpack(payload))
        answer = pack((True, result))
        del result
    except BaseException:  # SystemExit and pytest's outcomes too: the answer must come
        answer = pack((False, traceback.format_exc()))
        if torch.cuda.is_available():
            return answer  # the pool ends: closing NCCL's groups could wait for what will never come
    try:
        reset()
    except Exception:
        answer = pack((False, "in the clean-up after the job\n" + traceback.format_exc()))
    return answer


def fork_ranks(requests: socket.socket) -> None:
    """Answer requests until the other side is gone; nothing here may start a thread, which a fork would lose."""
    gc.disable()
    import torch

    import train.loop
    from train.engine import cpu

    assert torch.__name__ and train.loop.__name__ and cpu.__name__
    gc.freeze()
    while True:
        message, descriptors, _flags, _address = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return
        request = json.loads(message)
        answer: dict[str, Any]
        if "start" in request:
            pid = os.fork()
            if pid == 0:
                requests.close()
                _become_rank(request, *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = {"pid": pid}
        else:
            answer = {"code": _wait(request["wait"], request["seconds"])}
        requests.send(json.dumps(answer).encode())


def _become_rank(request: dict[str, Any], connection: int, log: int) -> None:
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        gc.enable()
        serve(Connection(connection), request["start"], request["world"], request["store"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _wait(pid: int, seconds: float) -> int | None:
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.005)


def main() -> None:
    """A rank, or the process that forks ranks."""
    # This file runs as __main__; a job that imports `rank_worker` must find the same list of clean-ups.
    sys.modules["rank_worker"] = sys.modules["__main__"]
    if sys.argv[1] == "fork":
        fork_ranks(socket.socket(fileno=int(sys.argv[2])))
    else:
        descriptor, rank, world, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
        serve(Connection(descriptor), rank, world, store)


if __name__ == "__main__":
    main()
