"""The report's figures of the other sites: pictures of the routers, rows of counted bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from train.report.sites import by_layer, router_pictures, site_rows
from train.tracking.readers import RunMetrics, read_metrics


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0, **more}


def routing(step: int) -> dict[str, Any]:
    layer = {"entropy": 0.9, "max_load": 1.5, "skip_rate": 0.5 - step / 100, "none_resident": 0.25}
    return {"layer_routing": {"10": layer, "2": layer | {"skip_rate": 0.25}}}


def federated() -> list[dict[str, Any]]:
    lines = [line(step, **routing(step)) for step in range(1, 9)]
    for step in (4, 8):
        lines[step - 1] |= {
            "router_agreement_before": {"2": 0.5, "10": 0.6},
            "router_agreement_after": {"2": 1.0, "10": 1.0},
            "router_drift": {"2": 0.1, "10": 0.2},
        }
    return lines


def test_values_come_by_layer_in_the_layers_order() -> None:
    found = by_layer(RunMetrics(training=federated()), "layer_routing", "skip_rate")
    assert list(found) == ["2", "10"] and found["2"][1].tolist() == [0.25] * 8
    assert found["10"][0].tolist() == list(range(1, 9)) and found["10"][1][0] == pytest.approx(0.49)
    assert by_layer(RunMetrics(training=federated()), "router_drift")["10"][1].tolist() == [0.2, 0.2]


def test_every_figure_that_there_is_has_a_picture(tmp_path: Path) -> None:
    pictures = router_pictures(RunMetrics(training=federated()), tmp_path)
    names = ["router_agreement.png", "router_drift.png", "skipping.png", "routing_entropy.png"]
    assert [picture.path.name for picture in pictures] == names
    for picture in pictures:
        pixels = np.asarray(Image.open(picture.path).convert("RGB"))
        assert pixels[0, 0].tolist() == [255, 255, 255] and (pixels.min(axis=2) < 200).mean() > 0.005


def test_a_run_of_one_site_has_no_picture_of_others(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    layer = {"entropy": 0.9, "max_load": 1.5, "skip_rate": 0.0, "none_resident": 0.0}
    lines = [line(step, layer_routing={"1": layer}) for step in (1, 2)]
    assert [picture.path.name for picture in router_pictures(RunMetrics(training=lines), tmp_path)] == ["routing_entropy.png"]
    assert router_pictures(RunMetrics(training=[line(1)]), tmp_path) == []
    from train.config.compose import load_config

    run_dir = make_run()
    assert site_rows(load_config(run_dir / "config.yaml"), read_metrics(run_dir / "metrics.jsonl"), run_dir) == []
