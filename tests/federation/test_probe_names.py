"""The probe's connections: kept while comparisons go well, and under a new name after one that failed."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_engine import small_config

from moe.membership import Meeting
from moe.monitor import RouterFigures, Snapshot
from train.federation import probe as module


def test_a_failed_comparison_is_followed_by_one_under_a_new_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    said: list[str] = []
    errors: list[Exception | None] = [None, None, ValueError("odd\nshapes"), None, None, RuntimeError("gone"), None]
    coming = iter(errors)

    def compare(*_: Any) -> RouterFigures:
        error = next(coming)
        if error is not None:
            raise error
        return RouterFigures({}, {}, {})

    exchange: Any = SimpleNamespace(use=lambda meeting: names.append(meeting.group), close=lambda: None)
    probe = module.RouterProbe(small_config(), SimpleNamespace(), [], [], exchange, said.append)  # type: ignore[arg-type]
    monkeypatch.setattr(module, "compare", compare)
    monkeypatch.setattr(probe, "_snapshot", lambda: Snapshot(chosen={0: None}, weights={}))
    for number, _ in enumerate(errors):
        group = "g0" if number < 6 else "p6"
        probe.before(Meeting(members=(0, 1), number=number, prefix=f"p{number}", group=group, store="", steps={}, data={}))
        probe.after()
    assert names == ["p0", "p0", "p0", "p3", "p3", "p3", "p6"]
    assert len(said) == 2 and "odd shapes" in said[0] and "gone" in said[1]


def test_a_line_about_a_finished_run_does_not_fail_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    from train import loop
    from train.federation import accounting

    def broken(_: Any) -> None:
        raise ValueError("no\nindex")

    monkeypatch.setattr(accounting, "account_of", broken)
    loop._say_what_moved(tmp_path)
    assert "cannot be told (no index)" in capsys.readouterr().out
