"""Starts `train.pretrain` by forking a process that has imported everything: a real process a rank in a tenth of a second.

    python fork_server.py         # started by `real_runs.Forge` only

Requests come on stdin, answers go to stdout, a JSON object a line:
    {"start": run directory, "ranks": n, "port": p, "fault": [file, function] or null, "log": prefix}  ->  {"pids": [...]}
    {"wait": [pids], "seconds": s}            ->  {"codes": [exit code, -signal, or null for one that still runs]}
"""

import importlib.util
import json
import os
import signal
import sys
import time


def start(request: dict) -> list[int]:
    pids = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if pid == 0:
            become(request, rank)
        pids.append(pid)
    return pids


def become(request: dict, rank: int) -> None:
    """Be a rank of the run; does not return."""
    code = 1
    try:
        log = os.open(f"{request['log']}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(request["ranks"]), LOCAL_WORLD_SIZE=str(request["ranks"]),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]),
        )  # fmt: skip
        if request["fault"]:
            file, function = request["fault"]
            spec = importlib.util.spec_from_file_location("fault", file)
            module = importlib.util.module_from_spec(spec)
            sys.modules["fault"] = module
            spec.loader.exec_module(module)
            getattr(module, function)(rank)
        from train.pretrain import main

        code = main(["--config", f"{request['start']}/config.yaml"])
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def wait(pids: list[int], seconds: float) -> list[int | None]:
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids) and time.monotonic() < end:
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes.get(pid) for pid in pids]


def main() -> None:
    sys.stdin.fileno()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    import train.loop
    from train.engine import cpu

    torch.set_num_threads(1)
    cpu.install()
    print(json.dumps({"ready": train.loop.__name__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"pids": start(request)} if "start" in request else {"codes": wait(request["wait"], request["seconds"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
