"""torchrun with two additions: it ends with the launcher, and it writes down which rank failed first.

    python -m launch.agent <launcher's pid> <report file> <arguments of torchrun>

The launcher starts this, never a user. The report is JSON: `failures`, a list of {rank, pid, exit_code, message} with the first cause
at its head; it is written only when a worker failed.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from train.worker import AGENT_VARIABLE, die_with_parent, failure_path


def main(argv: Sequence[str]) -> int:
    """Run torchrun's agent until its workers end; return 0, or 1 when one failed, or 128 + the signal that ended it."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process of a step; the ranks take it
    parent, report, arguments = int(argv[0]), Path(argv[1]), list(argv[2:])
    die_with_parent(signal.SIGTERM, parent)
    os.environ[AGENT_VARIABLE] = str(os.getpid())
    config, command, command_arguments = config_from_args(parse_args(arguments))
    try:
        elastic_launch(config=config, entrypoint=command)(*command_arguments)
    except ChildFailedError as error:
        report.write_text(json.dumps({"failures": ordered(error.failures, report.parent.parent)}), encoding="utf-8")
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def ordered(failures: dict[int, ProcessFailure], run_dir: Path) -> list[dict[str, object]]:
    """Return the failures, first cause first: a rank that reports a hang (those that hang are killed afterwards), one that was killed
    from outside, then those that say when they failed, in that order.

    A rank that dies takes the others with it within milliseconds, through a broken collective; torchrun's own times are whole seconds.
    """
    found = []
    for rank, failure in failures.items():
        said = failure_path(run_dir, rank)
        record = json.loads(said.read_text(encoding="utf-8")) if said.is_file() else {}
        killed = failure.exitcode < 0 and failure.exitcode not in (-signal.SIGTERM, -signal.SIGABRT)
        message = record.get("error") or failure.message
        entry = {
            "rank": rank, "pid": failure.pid, "exit_code": failure.exitcode, "message": " ".join(str(message).split()),
            "final": bool(record.get("final")),
        }  # fmt: skip
        found.append(((not record.get("hang"), not killed, record.get("time", float("inf")), rank), entry))
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
