"""A worker without torch: does what the environment of the test asks, for the launcher's tests."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from train.config.compose import load_config
from train.config.place import read_status, write_status
from train.worker import worker

config = Path(sys.argv[sys.argv.index("--config") + 1])
run_dir, rank = config.parent, int(os.environ["RANK"])
plan = json.loads(os.environ.get("STUB_PLAN", "{}"))
attempt = read_status(run_dir)["attempt"]
federation = load_config(config).federation

with worker(run_dir, rank):
    print(f"stub rank {rank} of {os.environ['WORLD_SIZE']}, threads {os.environ['OMP_NUM_THREADS']}, tty {sys.stdout.isatty()}", flush=True)
    (run_dir / f"pid_{rank}").write_text(str(os.getpid()))
    if federation.site is not None:
        about = {"cores": sorted(os.sched_getaffinity(0)), "endpoint": federation.endpoint, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
        (run_dir / f"about_{rank}").write_text(json.dumps(about | {"gloo": os.environ.get("GLOO_SOCKET_IFNAME")}))
    action = plan.get(f"{federation.site}/{rank}", plan.get(str(rank)))
    if action == "kill once":
        action = "kill" if attempt == 1 else None
    if action == "raise":
        raise RuntimeError("the stub was told to fail")
    if action == "kill":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "save":

        def leave(*_: object) -> None:
            if rank == 0:
                write_status(run_dir, state="preempted", attempt=attempt, exit_code=0, step=7)
            sys.exit(0)

        signal.signal(signal.SIGTERM, leave)
    if action in ("wait", "save") or plan.get("others") == "wait":
        (run_dir / f"waiting_{rank}").touch()
        time.sleep(60)
    if rank == 0:
        line = {"step": 1, "val_loss": float(os.environ.get("STUB_LOSS", "2.5"))}
        (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
