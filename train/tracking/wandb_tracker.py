"""Weights & Biases behind the `Tracker` interface: offline unless asked otherwise, started with a bounded wait.

wandb starts a service process and, online, talks to a server: either may be slow, and ranks that wait for the first one run into
their collectives' timeout. So it starts in a thread and is given up after `tracking.start_timeout` seconds. The run's id is kept
in `<run>/wandb_id`, so that a resumed run goes on as the same wandb run. Sent are the configuration and the figures, with the
machine's load; not the environment, the command line, the code, the console or the git state.
"""

import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.config.schema import Config
from train.tracking.identity import ID, identity_path, stored_identity, write_identity
from train.tracking.protocol import Metrics, TrackerStartError, flatten


def run_id(run_dir: Path) -> str:
    """The wandb id of the run in `run_dir`, made and kept in `wandb_id` on the first call."""
    text = stored_identity(run_dir)
    if text is None:
        text = secrets.token_hex(6)
        write_identity(run_dir, text)
    if ID.fullmatch(text):
        return text
    raise TrackerStartError(f"{identity_path(run_dir)} does not hold a wandb id; delete it to start a new wandb run")


class WandbTracker:
    """A started wandb run. Use :meth:`start`."""

    def __init__(self, run: Any, finish_timeout: float) -> None:
        self._run = run
        self._finish_timeout = finish_timeout
        self.folder = Path(run.dir).parent
        """Where wandb keeps this attempt; `wandb sync <folder>` uploads an offline one."""

    @classmethod
    def start(cls, config: Config, run_dir: Path, attempt: int, init: Callable[..., Any] | None = None) -> "WandbTracker":
        """Start within `tracking.start_timeout` seconds, or raise TrackerStartError with the reason. `init` stands in for wandb.init."""
        timeout = config.tracking.start_timeout
        identity = run_id(run_dir)
        outcome: dict[str, Any] = {}
        abandoned = threading.Event()

        def begin() -> None:
            try:
                run = _init(config, run_dir, identity, attempt, init)
            except BaseException as error:  # wandb raises its own kinds, also SystemExit; the waiting thread reports it
                outcome["error"] = error
                return
            outcome["run"] = run
            if abandoned.is_set():
                run.finish(exit_code=1)

        thread = threading.Thread(target=begin, name="wandb-start", daemon=True)
        thread.start()
        thread.join(timeout)
        if "run" in outcome:
            return cls(outcome["run"], timeout)
        if "error" in outcome:
            error = outcome["error"]
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TrackerStartError(f"wandb did not start ({reason})")
        abandoned.set()
        raise TrackerStartError(f"wandb did not start within tracking.start_timeout={timeout:g} s")

    def log(self, metrics: Metrics) -> None:
        self._run.log(flatten(metrics))

    def finish(self, status: str) -> None:
        """Close the wandb run; raise TimeoutError when an upload takes longer than the start was allowed to."""
        import wandb

        outcome: dict[str, BaseException] = {}

        def end() -> None:
            try:
                self._run.summary["status"] = status
                self._run.finish(exit_code=1 if status == "failed" else 0)
                wandb.teardown()  # an offline finish returns before the file is whole; this waits for the service to end
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=end, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(self._finish_timeout)
        if thread.is_alive():
            raise TimeoutError(f"wandb did not finish within {self._finish_timeout:g} s; what it has not sent is in {self.folder}")
        if "error" in outcome:
            raise RuntimeError(" ".join(str(outcome["error"]).split())) from outcome["error"]


def _init(config: Config, run_dir: Path, identity: str, attempt: int, init: Callable[..., Any] | None) -> Any:
    import wandb  # takes over a second, inside the bounded start

    online = config.tracking.mode == "online"
    if online and not wandb.login(prompt=False, verify=False):  # without this it would ask the terminal, from a thread
        raise TrackerStartError("tracking.mode=online needs an API key: run `wandb login`, or use tracking.mode=offline")
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        save_code=False,
        use_dot_wandb=False,
        x_disable_meta=True,
        x_save_requirements=False,
        init_timeout=max(1.0, config.tracking.start_timeout),
    )
    run = (init or wandb.init)(
        project=config.tracking.project,
        name=config.run.name or run_dir.name,
        id=identity,
        dir=str(run_dir),  # wandb makes its own folder `wandb` in it
        mode="online" if online else "offline",
        resume="allow",  # offline too: the attempts' folders become one run when they are uploaded
        config={**asdict(config), "attempt": attempt},
        settings=settings,
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
