"""The page of a run over several sites: what they reach together and apart. Each site has a page of its own, which this one links.

A further section is one more function of a `Whole` in `SECTIONS`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.residency import ResidencyPlan
from train.config.compose import load_config
from train.config.errors import ConfigError
from train.config.schema import Config
from train.evaluate import RESULT_FILE
from train.federation.residency import residency_plan
from train.report.files import bigram_of, facts_of, make_folder, metrics_of, sample_of, status_words, write_page
from train.report.page import Section, render
from train.report.patterns import pattern_pictures
from train.report.sites import routers_section, traffic_section
from train.report.summary import Row, configuration_rows
from train.report.whole_pictures import evaluation_picture, load_picture, sites_loss_picture
from train.tracking.readers import RunMetrics


@dataclass(frozen=True)
class Whole:
    """What the page is made of."""

    run_dir: Path
    folder: Path
    config: Config
    plan: ResidencyPlan | None
    metrics: dict[int, RunMetrics]
    """Of the sites that have begun, by number."""
    evaluation: dict[str, Any]
    """The last one of `leantron evaluate`; {} before the first."""
    bigram: float | None


def write_whole(run_dir: Path, places: Sequence[Path]) -> Path:
    """Write `<run_dir>/report/index.html`; `places` are the sites' directories. Returns the page's path. Raises ConfigError."""
    config = load_config(run_dir / "config.yaml")
    metrics = {}
    for place in places:
        try:
            metrics[int(place.name)] = metrics_of(place)
        except ConfigError:
            continue  # a site that has not come yet
    facts = facts_of(run_dir)
    entropies = [bigram_of(each, facts) for each in metrics.values()]
    whole = Whole(
        run_dir=run_dir,
        folder=make_folder(run_dir),
        config=config,
        plan=residency_plan(config),
        metrics=metrics,
        evaluation=_evaluation(run_dir),
        bigram=next((value for value in entropies if value is not None), None),
    )
    text = render(
        title=config.run.name or run_dir.resolve().name,
        status=f"{status_words(facts)}; {config.federation.sites} sites",
        figures=_figures(whole),
        sections=[make(whole) for make in SECTIONS],
        configuration=configuration_rows(config),
        sample=sample_of(run_dir),
    )
    return write_page(whole.folder, text)


def _evaluation(run_dir: Path) -> dict[str, Any]:
    try:
        read = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _figures(whole: Whole) -> list[Row]:
    federation, metrics = whole.config.federation, whole.metrics
    steps = ", ".join(f"{each.last('step'):,}" for each in metrics.values())
    rows = [
        Row(name="steps", value=f"{steps} of {whole.config.train.steps:,}", note="of each site"),
        Row(name="local steps between outer steps", value=f"{federation.sync_every:,}"),
    ]
    if whole.plan is not None:
        share = f"each is held by {whole.plan.replication} of {whole.plan.sites} sites"
        rows.append(Row(name="experts in a layer", value=f"{whole.plan.num_experts:,}", note=share))
    tokens = [line["tokens"] for each in metrics.values() for line in each.training[-1:] if isinstance(line.get("tokens"), int)]
    if tokens:
        rows.append(Row(name="tokens", value=f"{sum(tokens):,}", note="all sites together"))
    if whole.evaluation:
        note = f"bits per byte, the merged model at step {whole.evaluation['step']:,}"
        rows.append(Row(name="validation loss", value=f"{whole.evaluation['val_bits_per_byte']:.4f}", note=note))
    if whole.bigram is not None:
        rows.append(
            Row(name="bigram entropy of the data", value=f"{whole.bigram:.4f}", note="bits per byte; what counting byte pairs reaches")
        )
    return rows


def _training(whole: Whole) -> Section:
    picture = sites_loss_picture(whole.metrics, whole.folder, whole.bigram, whole.evaluation)
    links = [(f"../sites/{site}/report/index.html", f"site {site}: curves and experts") for site in whole.metrics]
    return Section("Training", [picture] if picture else [], links=links)


def _skipping(whole: Whole) -> Section:
    """The merged model beside each site's sliced one."""
    found = whole.evaluation
    if not found.get("sites"):
        return Section("What skipping costs")
    batches = f"bits per byte over {found['eval_steps']} global batches of held-out text"
    rows = [Row(name="merged model, every expert", value=f"{found['val_bits_per_byte']:.4f}", note=batches)]
    rows += [
        Row(
            name=f"site {each['site']}'s experts alone",
            value=f"{each['val_bits_per_byte']:.4f}",
            note=f"{each['gap_bits_per_byte']:+.4f}: what skipping the others costs",
        )
        for each in found["sites"]
    ]
    return Section("What skipping costs", [evaluation_picture(found, whole.folder, whole.bigram)], rows)


def _experts(whole: Whole) -> Section:
    picture = load_picture(whole.metrics, whole.plan, whole.folder)
    return Section("Experts", [picture] if picture else [])


def _attention(whole: Whole) -> Section:
    return Section("Attention", pattern_pictures(whole.config, whole.folder))


SECTIONS: tuple[Callable[[Whole], Section], ...] = (_training, _skipping, traffic_section, _experts, routers_section, _attention)
"""In the order of the page."""
