"""The report as a whole: which files, what the page says, and one line when there is nothing to report."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moe.config import MoeConfig
from train.config.errors import ConfigError
from train.config.place import hold
from train.config.schema import Config
from train.report import main, write_report


def line(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "loss": 5.0 - step / 10, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 100.0, "attempt": 0, **more}


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", page.read_text()))


def row(page: Path, name: str) -> str:
    """The value that the table of figures has for `name`."""
    found = re.findall(rf'<tr><td>{re.escape(name)}</td><td class="value">([^<]*)</td>', page.read_text())
    assert found, f"no row {name}"
    return unescape(found[-1])


def test_every_picture_is_on_the_page_and_drawn(make_run: Callable[..., Path]) -> None:
    page = write_report(make_run())
    assert page.name == "index.html" and page.parent.name == "report"
    shown = re.findall(r'<img src="([^"]+)"', page.read_text())
    assert sorted(shown) == sorted(path.name for path in page.parent.glob("*.png"))
    assert sorted(shown) == [
        "expert_load_layer_1.png",
        "expert_load_layer_3.png",
        "grad_norm.png",
        "loss.png",
        "lr.png",
        "pattern_layer_000.png",
        "pattern_layer_001.png",
        "tokens_per_second.png",
    ]
    for name in shown:
        pixels = np.asarray(Image.open(page.parent / name).convert("RGB"))
        assert pixels[0, 0].tolist() == [255, 255, 255], f"{name} has no light background"
        assert 0.005 < (pixels.min(axis=2) < 200).mean() < 0.9, f"{name} is empty or full"
    assert not list(page.parent.glob("*.part"))
    assert "http" not in page.read_text(), "the page must not fetch anything"


def test_the_figures_are_the_last_line_of_each_step(make_run: Callable[..., Path]) -> None:
    lines = [line(1), line(2, loss=9.0), line(2, val_loss=3.0, val_bits_per_byte=4.0), line(2, loss=1.25, attempt=1)]
    del lines[2]["loss"]
    page = write_report(make_run(lines, facts={"state": "completed", "bigram_bits_per_byte": 3.5}))
    assert row(page, "training loss") == "1.2500" and row(page, "steps") == "2 of 20"
    assert row(page, "bigram entropy of the data") == "3.5000"
    assert row(page, "validation loss") == "4.0000"
    assert "completed" in text_of(page)
    assert "attention.stride" in text_of(page) and "dense_layers" in text_of(page)


def test_the_bigram_line_comes_from_the_metrics_or_the_status_and_the_sample_from_its_file(make_run: Callable[..., Path]) -> None:
    run_dir = make_run([line(1, bits_per_byte=7.0), {"bigram_bits_per_byte": 3.25}], facts={"bigram_bits_per_byte": 1.0})
    assert row(write_report(run_dir), "bigram entropy of the data") == "3.2500"
    (run_dir / "metrics.jsonl").write_text(json.dumps(line(1, bits_per_byte=7.0)) + "\n")
    (run_dir / "sample.txt").write_text("def main():\n    <pass>")
    page = write_report(run_dir)
    assert row(page, "bigram entropy of the data") == "1.0000"
    assert "<pre>def main():\n    &lt;pass&gt;</pre>" in page.read_text()


def test_a_name_is_text_not_markup(make_run: Callable[..., Path]) -> None:
    page = write_report(make_run(name="<script>alert(1)</script>", facts={"state": "failed", "reason": "a < b & c"}))
    assert "<script" not in page.read_text()
    assert "failed: a < b & c" in text_of(page)


def test_a_run_whose_process_is_gone_is_not_said_to_be_running(make_run: Callable[..., Path]) -> None:
    here = make_run(facts={"state": "running", "host": socket.gethostname()})
    assert "died: it ended without a word, killed or with its machine" in text_of(write_report(here))
    hold(here)
    assert "died" not in text_of(write_report(here))


def test_a_run_on_another_host_is_said_to_be_there(make_run: Callable[..., Path]) -> None:
    there = make_run(facts={"state": "running", "host": "node7.example"})
    assert "running on node7.example when it last said something" in text_of(write_report(there))


def test_a_run_of_one_step_and_a_run_of_nan_have_reports(make_run: Callable[..., Path]) -> None:
    nan = float("nan")
    page = write_report(make_run([line(1, loss=nan, grad_norm=nan, lr=nan), line(2, loss=float("inf"), grad_norm=nan, lr=nan)]))
    assert (page.parent / "loss.png").exists() and not (page.parent / "grad_norm.png").exists()


def test_a_dense_model_without_experts_has_one_pattern_and_no_experts(make_run: Callable[..., Path]) -> None:
    base = Config()
    run_dir = make_run([line(1)], attention=base.attention, moe=MoeConfig())
    (run_dir / "report").mkdir()
    page = write_report(run_dir)
    assert [path.name for path in page.parent.glob("pattern*")] == ["pattern_layer_000.png"]
    assert "Experts" not in text_of(page) and "active parameters" not in text_of(page)


def test_a_second_report_replaces_the_first(make_run: Callable[..., Path]) -> None:
    run_dir = make_run([line(1)])
    before = row(write_report(run_dir), "steps")
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line(7)) + '\n{"step": 8, "lo')
    page = write_report(run_dir)
    assert (before, row(page, "steps")) == ("1 of 20", "7 of 20")
    assert row(page, "unreadable lines of metrics.jsonl") == "1"


def test_what_is_missing_is_named_in_one_line(make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    no_lines = make_run([])
    cases = (
        (tmp_path / "nowhere", "there is no such directory; name the directory of a run"),
        (empty, "the directory has no metrics.jsonl; name the directory of a run that has begun to train"),
        (no_lines, "metrics.jsonl has no line of figures yet; wait for the first step"),
    )
    for run_dir, message in cases:
        assert main([str(run_dir)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        assert said.err.startswith(f"leantron report: run={run_dir}: {message}")
    (no_lines / "metrics.jsonl").write_text(json.dumps(line(1)) + "\n")
    (no_lines / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"config=.*config\.yaml: the file cannot be read"):
        write_report(no_lines)


def test_the_module_runs_by_itself(make_run: Callable[..., Path]) -> None:
    run_dir = make_run([line(1)])
    ended = subprocess.run([sys.executable, "-m", "train.report", str(run_dir)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == f"report: {run_dir / 'report' / 'index.html'}"


def test_the_longest_context_is_drawn_by_its_first_blocks(make_run: Callable[..., Path]) -> None:
    run_dir = make_run([line(1)], train=replace(Config().train, seq_len=1 << 20))
    page = write_report(run_dir)
    assert "first 128 of 65536 blocks" in page.read_text()
