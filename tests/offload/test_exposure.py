"""What a step waits for the host: copies and the host's Adam count, the device's own updates do not. Ranges carry names."""

import pytest
import torch
from adam_cases import BUCKET, groups, parameters, set_gradients
from torch.profiler import ProfilerActivity, profile

from train.offload import OffloadedAdam, exposure
from train.offload import stream as stream_module
from train.offload.exposure import Exposure
from train.offload.traffic import Updater


class FakeClock:
    """Time that passes only where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(exposure.time, "perf_counter", lambda: self.now)


def test_the_mean_of_steps_without_the_devices_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = FakeClock(monkeypatch), Exposure(torch.device("cpu"))
    assert waited.take() is None
    for wait, work in ((0.5, 2.0), (1.5, 4.0)):
        waited.begin()
        clock.now += wait
        with waited.busy():
            clock.now += work
        waited.end()
    assert waited.take() == pytest.approx(1.0)
    assert waited.take() is None


@pytest.mark.parametrize(("mode", "expected"), [("none", 0.0), ("stream", 1.0), ("cpu_step", 1.0)])
def test_copies_and_the_hosts_adam_count(mode: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes a second here, an update on the device 100: of these only the first counts, in each mode the same number of buckets."""
    clock = FakeClock(monkeypatch)
    params = parameters((torch.bfloat16,))
    optimizer = OffloadedAdam(groups(params), mode=mode, bucket_elements=BUCKET)
    buckets = len(optimizer._traffic.layout.offloaded)

    def slowed(real, seconds):  # type: ignore[no-untyped-def]
        def call(*arguments, **named):  # type: ignore[no-untyped-def]
            clock.now += seconds
            return real(*arguments, **named)

        return call

    monkeypatch.setattr(Updater, "on_device", slowed(Updater.on_device, 100.0))
    if mode == "stream":  # each bucket is copied twice
        monkeypatch.setattr(stream_module, "copy_bucket", slowed(stream_module.copy_bucket, 0.5))
    monkeypatch.setattr(Updater, "on_host", slowed(Updater.on_host, 1.0))
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.exposed_seconds() == pytest.approx(expected * buckets)
    assert optimizer.exposed_seconds() is None


@pytest.mark.parametrize(
    ("mode", "names"),
    [("none", set()), ("stream", {"offload.h2d", "offload.d2h"}), ("cpu_step", {"offload.h2d", "offload.host_adam", "offload.d2h"})],
)
def test_the_profiler_sees_the_parts(mode: str, names: set[str]) -> None:
    params = parameters((torch.bfloat16,))
    optimizer = OffloadedAdam(groups(params), mode=mode, bucket_elements=BUCKET)
    set_gradients(params, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    seen = {event.key for event in profiled.key_averages()}
    assert {name for name in seen if name.startswith("offload.")} == names
