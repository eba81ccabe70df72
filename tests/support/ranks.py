"""Long-lived pools of ranks: importing torch and Megatron-core costs seconds a process, so tests share processes.

    def job(scale):                            # a top-level function of the test module
        x = torch.full((2,), scale * dist.get_rank())
        dist.all_reduce(x)
        return x

    def test_sum(ranks):
        results = ranks(2).run(job, 3.0)       # the answers by rank

The default process group lives as long as the pool and has exactly its size; every other group is destroyed after the
job, and so are Megatron-core's globals and the random state. A rank that raises, dies or hangs makes `run` raise
`RankError` with that rank's traceback or stack; the pool is then replaced.

Ranks are processes on the CPU, joined by gloo, forked by one process that has imported everything.
`RankPools("cuda")` gives each rank a GPU of its own, with NCCL beside gloo.
"""

import atexit
import contextlib
import functools
import inspect
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rank_worker import pack, unpack

_SUPPORT = Path(__file__).resolve().parent
_REPOSITORY = _SUPPORT.parents[1]
_START_SECONDS = 180.0
_GRACE_SECONDS = 3.0  # what the other ranks get to finish once one has failed
_LOG_TAIL = 4000
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""Environment of processes that share GPUs' links: a program that dies in NVLink multicast can take the host's GPUs with it."""


_COMMON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RankError(AssertionError):
    """A rank failed; the message holds the tracebacks. `tracebacks` maps the failed ranks to theirs."""

    def __init__(self, message: str, tracebacks: dict[int, str]) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks


class Forks:
    """The process that forks ranks (`rank_worker.py fork`); it ends with this one, and its ranks with it."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(_SUPPORT / "rank_worker.py"), "fork", str(theirs.fileno())]
        environment = {**os.environ, **_COMMON, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": _path()}
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request and return its answer."""
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        answer = self._requests.recv(1 << 16)
        if not answer:
            raise RuntimeError("the process that forks ranks has died")
        result: dict[str, Any] = json.loads(answer)
        return result

    def close(self) -> None:
        """End it."""
        self._requests.close()
        self._process.wait()


@functools.cache
def forks() -> Forks:
    """This session's."""
    return Forks()


class ForkedRank:
    """What `subprocess.Popen` is to a started rank, for a forked one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self, timeout: float = 600.0) -> int:
        """The exit code; raises subprocess.TimeoutExpired."""
        if self._code is None:
            self._code = forks().ask({"wait": self.pid, "seconds": timeout})["code"]
        if self._code is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self._code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _path() -> str:
    return os.pathsep.join([str(_REPOSITORY), str(_SUPPORT), *filter(None, sys.path)])


class RankPool:
    """`size` processes on this machine, joined by gloo over the loopback interface; on `cuda` one a GPU, with NCCL for its tensors.

    `environment`: variables that they get besides.
    """

    def __init__(self, size: int, device: str = "cpu", environment: Mapping[str, str] | None = None) -> None:
        self.size, self.device = size, device
        self._forked = device == "cpu" and not environment  # some variables are read by imports
        self._environment = {**({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else MULTICAST_OFF), **(environment or {})}
        self.alive = True
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        self._connections: list[Connection] = []
        for rank in range(size):
            self._start(rank)
        self._collect("start of the pool", _START_SECONDS)

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": _path(),
            **self._environment,
            **_COMMON,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
        }
        store = str(self._folder / "store")
        process: subprocess.Popen[bytes] | ForkedRank
        with open(self._log(rank), "wb") as log:
            if self._forked:
                request = {"start": rank, "world": self.size, "store": store, "environment": environment}
                process = ForkedRank(forks().ask(request, [theirs.fileno(), log.fileno()])["pid"])
            else:
                command = [sys.executable, str(_SUPPORT / "rank_worker.py"), str(theirs.fileno()), str(rank), str(self.size), store]
                process = subprocess.Popen(
                    command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def pids(self) -> list[int]:
        """The ranks' process ids."""
        return [process.pid for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(*args)` on every rank; the answers by rank.

        The function must be at the top level of its file, its arguments and answer must pickle. Raises RankError when a
        rank raises, dies, or has not answered after `timeout` seconds, and ValueError for a function that cannot be found.
        """
        if not self.alive:
            raise ValueError(f"this pool of {self.size} ranks is closed; ask the `ranks` fixture for a new one")
        if "." in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not at the top level of its file: a rank cannot find it")
        file = inspect.getsourcefile(function)
        header = pickle.dumps((function.__module__, file and os.path.abspath(file), function.__name__))
        payload = pack(args)
        # A rank that died since the last job shows when its answer is read.
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(header)
                connection.send_bytes(payload)
        return self._collect(function.__name__, timeout)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        end = time.monotonic() + timeout
        while waiting and (left := end - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value = unpack(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    good, value = False, self._epitaph(rank)
                (answers if good else errors)[rank] = value
            if errors:
                end = min(end, time.monotonic() + _GRACE_SECONDS)
        if not waiting and not errors:
            return [answers[rank] for rank in range(self.size)]
        late = sorted(waiting.values())
        if not errors:
            errors = dict(zip(late, self._stacks(late), strict=True))
            reason = f"rank {', '.join(map(str, late))} did not answer within {timeout:g} s"
        else:
            reason = f"rank {', '.join(map(str, sorted(errors)))} failed"
        # Ranks that all failed alike are in step; otherwise messages of the failed job may still be under way.
        # A rank that met an error on its GPU can do nothing more there.
        if late or answers or self.device != "cpu" or len({text.strip().splitlines()[-1] for text in errors.values()}) > 1:
            self.close()
        details = "\n".join(f"--- rank {rank} of {self.size}\n{errors[rank].rstrip()}" for rank in sorted(errors))
        raise RankError(f"{what}: {reason}\n{details}", errors)

    def _epitaph(self, rank: int) -> str:
        code = self._processes[rank].wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{self._tail(rank)}\nthe process ended with {how}"

    def _stacks(self, late: Sequence[int]) -> list[str]:
        for rank in late:
            self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        return [self._tail(rank) or "no stack: the process does not react" for rank in late]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank_{rank}.log"

    def _tail(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")[-_LOG_TAIL:].strip()

    def close(self) -> None:
        """End the ranks: kindly when they are idle, by force after two seconds."""
        self.alive = False
        for connection in self._connections:
            connection.close()
        end = time.monotonic() + 2.0
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RankPools:
    """The pools of a test session by size: made when first asked for, replaced after a failure."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int) -> RankPool:
        """A pool of `size` ranks, 1 to 4."""
        if not 1 <= size <= 4:
            raise ValueError(f"pool of {size} ranks: 1 to 4 are kept; test with fewer")
        pool = self._pools.get(size)
        if pool is None or not pool.alive:
            pool = self._pools[size] = RankPool(size, self.device)
        return pool

    def close(self) -> None:
        """End all pools."""
        for pool in self._pools.values():
            if pool.alive:
                pool.close()
        self._pools.clear()
