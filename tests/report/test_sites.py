"""The report's figures of the other sites: pictures of the routers, rows of counted bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moe.config import MoeConfig
from train.checkpoint.directory import checkpoint_path, partial_path, publish
from train.checkpoint.tensors import write_tensors
from train.config.compose import dump_config, load_config
from train.config.schema import Config, RunConfig
from train.federation.config import FederationConfig
from train.report import write_reports
from train.report.sites import by_layer, router_pictures
from train.tracking.jsonl import JsonlTracker
from train.tracking.readers import RunMetrics


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


def test_a_run_of_one_site_has_no_picture_of_others(tmp_path: Path) -> None:
    layer = {"entropy": 0.9, "max_load": 1.5, "skip_rate": 0.0, "none_resident": 0.0}
    lines = [line(step, layer_routing={"1": layer}) for step in (1, 2)]
    assert [picture.path.name for picture in router_pictures(RunMetrics(training=lines), tmp_path)] == ["routing_entropy.png"]
    assert router_pictures(RunMetrics(training=[line(1)]), tmp_path) == []


def site(run_dir: Path, number: int, lines: list[dict[str, Any]]) -> None:
    """A site's directory: configuration, metrics, and a checkpoint of 10 dense parameters, experts of 6 and router rows of 3."""
    place = run_dir / "sites" / str(number)
    place.mkdir(parents=True)
    federation = FederationConfig(sites=2, replication=2, sync_every=4, site=number, endpoint="127.0.0.1:1")
    model, moe = (
        replace(Config().model, layers=2, vocab_size=7, kv_heads=4, head_dim=32, ffn_width=64),
        MoeConfig(experts=2, layers=[1], ffn_width=1, mode="skip"),
    )
    dump_config(replace(Config(), run=RunConfig(name="two"), federation=federation, model=model, moe=moe), place / "config.yaml")
    tracker = JsonlTracker(place / "metrics.jsonl")
    for each in lines:
        tracker.log(each)
    tracker.finish("completed")
    final = checkpoint_path(place / "checkpoints", 8)
    partial_path(final).mkdir(parents=True)
    weights = {"embedding.word_embeddings.weight": (5, 2), "decoder.layers.1.mlp.router.weight": (2, 3)}
    weights |= {f"decoder.layers.1.mlp.experts.{expert}.{name}": (3,) for expert in range(2) for name in ("w_in", "w_out")}
    write_tensors(partial_path(final), ((name, torch.zeros(shape)) for name, shape in weights.items()))
    publish(partial_path(final), final, 8, {})


def test_the_page_shows_counted_bytes_beside_the_formula(tmp_path: Path) -> None:
    # 10 dense, two experts of 6, two rows of 3, all at both sites: 28 parameters, 4 bytes, two rounds.
    moved = {"outer_bytes": 224, "outer_bytes_received": 224, "outer_payload_bytes": 448, "sites_present": 2, "outer_failed": 0}
    lines = [line(1), line(8, outer_round=2, **moved)]
    for number in range(2):
        site(tmp_path, number, lines)
    dump_config(load_config(tmp_path / "sites/0/config.yaml"), tmp_path / "config.yaml")
    page, *_ = write_reports(tmp_path)
    text = page.read_text()
    assert "Bytes between sites" in text and text.count("formula 448, counted / formula 1.0000; 2 outer steps of 4 local steps") == 2
    assert text.count("ring formula 224, counted / formula 1.0000; 224 received") == 2 and "bear in mind" not in text
