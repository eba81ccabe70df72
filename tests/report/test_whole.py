"""The page of a run over several sites: one for the run, one for each site, linked; the merged and the sliced models beside each other."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moe.config import MoeConfig
from train.config.compose import dump_config, load_config
from train.federation.config import FederationConfig
from train.report.cli import main
from train.report.write import write_reports
from train.tracking.jsonl import JsonlTracker

EVALUATION = {
    "step": 20,
    "eval_steps": 4,
    "val_loss": 1.7,
    "val_bits_per_byte": 2.5,
    "sites": [
        {"site": 0, "experts": [2, 2], "val_loss": 1.8, "val_bits_per_byte": 2.625, "gap_bits_per_byte": 0.125},
        {"site": 1, "experts": [2, 2], "val_loss": 1.9, "val_bits_per_byte": 2.75, "gap_bits_per_byte": 0.25},
    ],
}


def line(site: int, step: int) -> dict[str, Any]:
    load = [0.4, 0.3, 0.2, 0.1] if site == 0 else [0.1, 0.2, 0.3, 0.4]
    return {
        "step": step, "loss": 3.0, "bits_per_byte": 5.0 - 0.1 * step - site, "lr": 1e-3, "grad_norm": 1.0, "tokens": 100 * step,
        "expert_load": {"1": load, "3": load}, "attempt": 1,
    }  # fmt: skip


@pytest.fixture
def sites_run(make_run: Callable[..., Path]) -> Path:
    """A run of three sites, of which the third has not begun."""
    federation = FederationConfig(sites=3, replication=2, sync_every=4)
    run_dir = make_run(federation=federation, moe=MoeConfig(experts=4, layers=[1, 3], ffn_width=192, mode="skip"))
    (run_dir / "metrics.jsonl").unlink()
    config = load_config(run_dir / "config.yaml")
    for site in range(3):
        place = run_dir / "sites" / str(site)
        place.mkdir(parents=True)
        dump_config(replace(config, federation=replace(federation, site=site, endpoint="127.0.0.1:1")), place / "config.yaml")
        if site == 2:
            continue
        tracker = JsonlTracker(place / "metrics.jsonl")
        for step in range(1, 21):
            tracker.log(line(site, step))
        tracker.log({"step": 20, "val_loss": 2.0, "val_bits_per_byte": 2.9 + site, "bigram_bits_per_byte": 3.5})
        tracker.finish("completed")
    (run_dir / "status.json").write_text(json.dumps({"state": "failed", "reason": "site 2 never came"}))
    return run_dir


def text_of(page: Path) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", page.read_text()))


def drawn(page: Path, name: str) -> None:
    pixels = np.asarray(Image.open(page.parent / name).convert("RGB"))
    assert pixels[0, 0].tolist() == [255, 255, 255] and (pixels.min(axis=2) < 200).mean() > 0.005, name


def test_the_run_has_a_page_that_links_those_of_its_sites(sites_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (sites_run / "sites" / "2" / "metrics.jsonl").write_text(json.dumps(line(2, 1)) + "\n")
    assert main([str(sites_run)]) == 0
    pages = [sites_run / "report" / "index.html", *(sites_run / "sites" / str(site) / "report" / "index.html" for site in range(3))]
    assert capsys.readouterr().out.splitlines() == [f"report: {page}" for page in pages]
    for address in re.findall(r'href="([^"]+)"', pages[0].read_text()):
        assert (pages[0].parent / address).resolve() in [page.resolve() for page in pages[1:]]
    text = text_of(pages[0])
    assert "20, 20, 1 of 20" in text and "4,100" in text, "steps and tokens of all sites"
    assert "each is held by 2 of 3 sites" in text
    for name in ("loss.png", "load_by_site.png"):
        drawn(pages[0], name)
    assert "What skipping costs" not in text and not (sites_run / "report" / "evaluation.png").exists()


def test_a_site_that_has_not_begun_does_not_keep_the_page_from_the_others(sites_run: Path) -> None:
    (page, *others) = write_reports(sites_run)
    assert "failed: site 2 never came; 3 sites" in text_of(page)
    assert [other.parent.parent.name for other in others] == ["0", "1"]


def test_the_evaluation_shows_the_gap(sites_run: Path) -> None:
    (sites_run / "evaluation.json").write_text(json.dumps(EVALUATION))
    (sites_run / "sample.txt").write_text("def main():")
    page = write_reports(sites_run)[0]
    text = text_of(page)
    assert "2.5000" in text and "+0.1250" in text and "+0.2500" in text and "2.7500" in text
    assert "def main():" in text
    drawn(page, "evaluation.png")
