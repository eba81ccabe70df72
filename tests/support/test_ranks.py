"""The pools that all other multi-rank tests stand on."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPools


@dataclass
class Answer:
    rank: int
    total: float


def add(base: float) -> Answer:
    x = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(x)
    return Answer(dist.get_rank(), x.item())


def echo(answer: Answer) -> tuple[int, Answer]:
    return os.getpid(), answer


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on {rank}")
    dist.barrier()


def fail_alike() -> None:
    raise KeyError("the same everywhere")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        a_place_to_hang()


def a_place_to_hang() -> None:
    time.sleep(600)


def draw() -> tuple[float, float]:
    return random.random(), torch.rand(()).item()


def make_groups() -> int:
    for _ in range(3):
        dist.new_group([0, 1])
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return len(dist.distributed_c10d._world.pg_map)


def state() -> tuple[int, torch.dtype, bool]:
    return len(dist.distributed_c10d._world.pg_map), torch.get_default_dtype(), torch.is_grad_enabled()


def count_jobs() -> int:
    import rank_worker

    rank_worker.at_job_end(remember)
    return len(_ended)


_ended: list[int] = []


def remember() -> None:
    _ended.append(1)


def core_state(initialise: bool) -> bool:
    from megatron.core import parallel_state

    if initialise:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return parallel_state.is_initialized()


def test_results_by_rank_and_classes_of_a_test_module_travel(ranks: RankPools) -> None:
    assert ranks(2).run(add, 10.0) == [Answer(0, 21.0), Answer(1, 21.0)]
    pids, answers = zip(*ranks(2).run(echo, Answer(7, 1.5)), strict=True)
    assert answers == (Answer(7, 1.5), Answer(7, 1.5))
    assert list(pids) == ranks(2).pids()


def test_one_process_group_per_size_and_reuse(ranks: RankPools) -> None:
    pool = ranks(1)
    assert pool.run(add, 1.0) == [Answer(0, 1.0)]
    assert ranks(1) is pool and ranks(2) is not pool
    with pytest.raises(ValueError, match="1 to 4"):
        ranks(5)
    with pytest.raises(ValueError, match="top level"):
        pool.run(lambda: None)


def test_an_error_on_one_rank_carries_its_traceback_and_ends_the_pool(ranks: RankPools) -> None:
    pool = ranks(2)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 failed") as caught:
        pool.run(fail_on, 1)
    assert time.monotonic() - start < 20
    assert set(caught.value.tracebacks) >= {1}
    assert "planted on 1" in str(caught.value) and "in fail_on" in str(caught.value)
    assert not pool.alive
    with pytest.raises(ValueError, match="closed"):
        pool.run(draw)
    assert ranks(2).run(add, 0.0)[0].total == 1.0


def test_a_pool_survives_an_error_that_all_ranks_share(ranks: RankPools) -> None:
    pool = ranks(2)
    with pytest.raises(RankError, match="the same everywhere"):
        pool.run(fail_alike)
    assert ranks(2) is pool and pool.run(add, 0.0)[1].total == 1.0


def test_a_killed_rank_is_named_with_its_signal_and_last_output(ranks: RankPools) -> None:
    with pytest.raises(RankError, match="SIGKILL") as caught:
        ranks(2).run(die_on, 0)
    assert "last words" in caught.value.tracebacks[0]
    assert ranks(2).run(add, 0.0)[0].total == 1.0


def test_a_hung_rank_shows_where_it_hangs(ranks: RankPools) -> None:
    pool = ranks(2)
    pids = pool.pids()
    with pytest.raises(RankError, match=r"rank 1 did not answer within 2 s") as caught:
        pool.run(hang_on, 1, timeout=2)
    assert "a_place_to_hang" in str(caught.value)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_nothing_is_left_to_the_next_job(ranks: RankPools) -> None:
    pool = ranks(2)
    assert pool.run(draw) == pool.run(draw)
    assert pool.run(make_groups) == [4, 4]
    assert pool.run(state) == [(1, torch.float32, True)] * 2
    assert pool.run(count_jobs) == [0, 0]
    assert pool.run(count_jobs) == [1, 1]


def tensor_after_core() -> torch.Tensor:
    import megatron.core.safe_globals  # noqa: F401  (it replaces how tensors are pickled)

    return torch.arange(3)


def test_reading_a_tensor_does_not_import_core_into_pytest() -> None:
    code = f"""
import sys, torch
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
import importlib.util
spec = importlib.util.spec_from_file_location("jobs", {__file__!r})
jobs = sys.modules["jobs"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jobs)
from ranks import RankPool
pool = RankPool(1, environment={{'OWN': '1'}})  # started, not forked
assert torch.equal(pool.run(jobs.tensor_after_core)[0], torch.arange(3))
pool.close()
assert "megatron" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_megatron_core_is_uninitialised_between_jobs(ranks: RankPools) -> None:
    assert ranks(2).run(core_state, True) == [True, True]
    assert ranks(2).run(core_state, False) == [False, False]
    assert ranks(2).run(core_state, True) == [True, True]
