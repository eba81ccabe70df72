"""DeepSpeed's CPU Adam as the host's: whether it can work here, and its compiled operation, built once for a machine and bounded in time.

DeepSpeed compiles the operation when it is first used, which takes minutes, and torch guards such a build by a file whose existence is
the lock: a build that is killed leaves it behind, and every later one waits for ever. So the build runs in a folder of its own, in a
process with a time limit, under a lock of the kernel that ends with its holder; a lock file found under it can only be a dead one's.
That process sees no GPU: the operation is for the CPU, and needs no CUDA to compile. Here only its module is loaded, never DeepSpeed.

Importing this module imports neither torch nor DeepSpeed.
"""

import fcntl
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

BUILD_SECONDS = 900.0
"""Time that a build, or waiting for another process's, may take."""
_BUILD = """
import sys
from deepspeed.ops.op_builder import CPUAdamBuilder
with open(sys.argv[1], "w") as file:
    file.write(CPUAdamBuilder().load().__file__)
"""
_loaded: list[Any] = []


class Unavailable(ValueError):
    """DeepSpeed's CPU Adam cannot work here; the message says why, without a remedy."""


def why_not() -> str | None:
    """The reason why DeepSpeed's CPU Adam cannot be built here, or None; cheap, and no promise that the build succeeds."""
    if importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    compiler = os.environ.get("CXX", "c++")
    for tool, what in ((compiler, "C++ compiler"), ("ninja", "build tool")):
        if shutil.which(tool, path=_search_path()) is None:
            return f"there is no {what} ({tool}) on PATH, and its operation is compiled here"
    return None


def _search_path() -> str:
    """PATH with the scripts of this interpreter's environment, where pip puts ninja, also when the environment is not activated."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")))


def folder() -> Path:
    """Where the operation is built: on machines of a shared home directory one for each, as it is compiled for the machine's own CPU."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "leantron", "extensions")
    return (Path(named, "leantron") if named else cache) / f"{platform.node()}-py{sys.version_info.major}{sys.version_info.minor}"


def load(seconds: float = BUILD_SECONDS) -> Any:
    """DeepSpeed's operation, built first where that was not done yet. Raises Unavailable in one line after `seconds` at the latest."""
    if _loaded:
        return _loaded[0]
    reason = why_not()
    if reason is not None:
        raise Unavailable(reason)
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place / "building", seconds) as lock:
        built, module = place / "built", place / "module"
        if not built.is_file() or built.read_text() != _versions():
            (place / "cpu_adam" / "lock").unlink(missing_ok=True)
            _build(place, module, seconds, lock)
            built.write_text(_versions())
    try:
        spec = importlib.util.spec_from_file_location("cpu_adam", module.read_text())
        assert spec is not None and spec.loader is not None
        operation = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(operation)
    except (OSError, ImportError) as error:
        raise Unavailable(f"its operation does not load ({_last_line(str(error))}); delete {place} to have it built anew") from error
    _loaded.append(operation)
    return operation


def _versions() -> str:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "unknown"

    return f"deepspeed {of('deepspeed')}, torch {of('torch')}"


@contextmanager
def _locked(path: Path, seconds: float) -> Iterator[int]:
    """Hold the kernel's lock on `path`; yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise Unavailable(f"another process has been building it for {seconds:.0f} s ({path} is locked)") from None
                time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def _build(place: Path, module: Path, seconds: float, lock: int) -> None:
    """Build in `place` and write the path of what was built to `module`."""
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(place), "PATH": _search_path(), "CUDA_VISIBLE_DEVICES": ""}
    # The child holds the lock too: should this process be killed, the lock lasts as long as the compilers.
    child = subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(module)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, pass_fds=(lock,), start_new_session=True,
    )  # fmt: skip
    try:
        told, _ = child.communicate(timeout=seconds)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise Unavailable(f"its build took over {seconds:.0f} s") from None
        raise
    if child.returncode:
        raise Unavailable(f"its build failed ({_last_line(told)})")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "without a word"
