"""The program of each rank of a pretraining run.

torchrun --nproc-per-node 2 -m train.pretrain experiment=demo      # by hand
leantron pretrain experiment=demo                                  # the launcher starts the same, from a written configuration
"""

import os
import sys
from collections.abc import Sequence

from train.config.errors import ConfigError
from train.config.publish import resolve
from train.worker import quiet_dependencies, worker


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code, 2 for a configuration that is refused (one line on stderr, the same on every rank)."""
    try:
        resolved = resolve(argv)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    with worker(resolved.run_dir, rank):
        quiet_dependencies()
        from train.engine import parallel

        device = parallel.init_process_group(resolved.config.train.timeout)
        from train.loop import pretrain

        ranks = parallel.build_ranks(resolved.config, device)
        pretrain(resolved.config, resolved.run_dir, resolved.attempt, resolved.resumed, ranks)
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
