"""A torchrun without torch: starts the ranks of one world, ends them all when one fails, writes down which it was."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from train.worker import AGENT_VARIABLE, die_with_parent, failure_path

signal.signal(signal.SIGUSR1, signal.SIG_IGN)
parent, report = int(sys.argv[1]), Path(sys.argv[2])
die_with_parent(signal.SIGTERM, parent)
options = [text for text in sys.argv[3:] if text.startswith("--") and "=" in text]
world = next(text.partition("=")[2] for text in options if text.startswith("--nproc-per-node="))
worker = [text for text in sys.argv[3:] if text not in options]
ranks = [
    subprocess.Popen(
        [sys.executable, *worker], env={**os.environ, "RANK": str(rank), "WORLD_SIZE": world, AGENT_VARIABLE: str(os.getpid())}
    )
    for rank in range(int(world))
]
signal.signal(signal.SIGTERM, lambda *_: [rank.terminate() for rank in ranks] and sys.exit(143))
while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
    time.sleep(0.02)
failed = [(number, rank) for number, rank in enumerate(ranks) if rank.poll()]
for rank in ranks:
    rank.terminate()
    rank.wait()
if failed:
    number, rank = failed[0]
    said = failure_path(report.parent.parent, number)
    message = json.loads(said.read_text())["error"] if said.is_file() else ""
    entry = {"rank": number, "pid": rank.pid, "exit_code": rank.returncode, "message": message, "final": False}
    report.write_text(json.dumps({"failures": [entry]}))
    sys.exit(1)
