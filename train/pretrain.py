"""The program of each rank of a pretraining run.

torchrun --nproc-per-node 2 -m train.pretrain experiment=demo      # by hand
leantron pretrain experiment=demo                                  # the launcher starts the same, from a written configuration
"""

import gc
import os
import sys
from collections.abc import Sequence

from train.config.check_offload import prepare_offload
from train.config.errors import ConfigError
from train.config.publish import resolve
from train.preemption import StopRequest
from train.watchdog import Watchdog
from train.worker import end_failed, quiet_dependencies, worker


def main(argv: Sequence[str]) -> int:
    """Train; returns the exit code, 2 for a configuration that is refused (one line on stderr, the same on every rank)."""
    stop = StopRequest()
    stop.listen_early()
    try:
        resolved = resolve(argv)
        prepare_offload(resolved.config.offload)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        return 2
    config, run_dir = resolved.config, resolved.run_dir
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with worker(run_dir, rank):
        quiet_dependencies()
        watchdog = Watchdog(run_dir, rank, world, config.train.hang_timeout, lambda line: end_failed(run_dir, rank, line, hang=True))
        watchdog.start()
        gc.disable()  # importing makes half a million objects that stay; walking them again and again would double its time
        from train.engine import parallel
        from train.loop import pretrain

        gc.freeze()
        gc.enable()
        device = parallel.init_process_group(config.train.timeout)
        ranks = parallel.build_ranks(config, device)
        pretrain(config, run_dir, resolved.attempt, resolved.resumed, ranks, stop=stop, watchdog=watchdog)
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
