"""What a site's report says of the others: bytes of the outer steps beside the formula, and how alike the sites' routers are."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from train.config.schema import Config
from train.federation.accounting import SiteAccount, account, sizes_from_run
from train.report.curves import Picture
from train.report.style import BLUE, GREY, ORANGE, VERMILLION, figure, save, tidy
from train.report.summary import Row
from train.tracking.readers import RunMetrics


def site_rows(config: Config, metrics: RunMetrics, place: Path) -> list[Row]:
    """Bytes that the site in `place` moved, counted and by both formulas; [] before an outer step and for a run of one site."""
    found = sizes_from_run(place) if config.federation.sites > 1 else None
    moved = None if found is None else account(config, metrics, found[0], f"the index of {found[1].name}")
    return [] if moved is None else _rows(moved)


def _rows(moved: SiteAccount) -> list[Row]:
    steps = f"in {moved.rounds:,} outer steps of {moved.sync_every} local steps"
    rows = [
        Row(name="bytes handed over and got back", value=f"{moved.payload:,}", note=f"payload, counted, {steps}"),
        Row(name="payload by formula", value=f"{moved.formula_payload:,.0f}", note=f"counted / formula {moved.payload_ratio:.4f}"),
        Row(name="bytes sent", value=f"{moved.sent:,}", note=f"counted; {moved.received:,} received"),
        Row(name="ring by formula", value=f"{moved.formula_ring:,.0f}", note=f"sent / formula {moved.ring_ratio:.4f}"),
        Row(name="parameters of the formulas", value=moved.source.split()[-1], note=f"from {moved.source}"),
    ]
    return rows + [Row(name="to bear in mind", value="", note=caveat) for caveat in moved.caveats]


def by_layer(metrics: RunMetrics, key: str, inner: str | None = None) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Layer to steps (n,) and values (n,) of a figure that lines have by layer, or, with `inner`, as one of several of a layer."""
    seen: dict[str, tuple[list[float], list[float]]] = {}
    for line in metrics.training:
        found: Any = line.get(key)
        for layer, value in found.items() if isinstance(found, dict) else ():
            if inner is not None:
                value = value.get(inner) if isinstance(value, dict) else None
            if isinstance(value, int | float):
                steps, values = seen.setdefault(layer, ([], []))
                steps.append(float(line["step"]))
                values.append(float(value))
    order = sorted(seen, key=lambda layer: (not layer.isdigit(), int(layer) if layer.isdigit() else 0, layer))
    return {layer: (np.array(seen[layer][0]), np.array(seen[layer][1])) for layer in order}


def router_pictures(metrics: RunMetrics, folder: Path) -> list[Picture]:
    """Agreement of the sites' routers and their drift, and the routing at this site; those of which there are figures."""
    pictures = [
        _band(
            metrics, folder, "router_agreement", "Sites that choose alike", "share of a token's experts",
            "Share of a token's experts that two sites have in common on one probe batch, at each outer step: mean over the layers, "
            "pale from the least to the most of them.",
            (("router_agreement_before", None, "before the outer step", VERMILLION), ("router_agreement_after", None, "after it", BLUE)),
        ),
        _band(
            metrics, folder, "router_drift", "Drift of the routers between sites", "distance over norm",
            "Distance of the sites' router rows to their mean (root mean square over the sites), over the norm of the mean, "
            "before each outer step: mean over the layers, pale from the least to the most of them.",
            (("router_drift", None, "router rows", BLUE),),
        ),
        _band(
            metrics, folder, "skipping", "Skipped", "share",
            "Share of assignments whose expert is not held here, and of tokens with no expert here at all: mean over the layers, pale from "
            "the least to the most of them.",
            (("layer_routing", "skip_rate", "assignments", ORANGE), ("layer_routing", "none_resident", "tokens without an expert", GREY)),
        ),
        _band(
            metrics, folder, "routing_entropy", "Evenness of the experts' load", "entropy, 1 is even",
            "Entropy of the experts' load before skipping, over that of an even load: mean over the layers, pale from the least to the "
            "most of them.",
            (("layer_routing", "entropy", "entropy", BLUE),),
        ),
    ]  # fmt: skip
    return [picture for picture in pictures if picture is not None]


_Curve = tuple[str, str | None, str, str]


def _band(metrics: RunMetrics, folder: Path, name: str, title: str, unit: str, caption: str, curves: tuple[_Curve, ...]) -> Picture | None:
    """Each curve's mean over the layers and the band between its extremes; None when no line has any, or all are zero."""
    drawn = figure()
    axes = drawn.add_subplot()
    anything = False
    for key, inner, label, colour in curves:
        layers = by_layer(metrics, key, inner)
        steps = sorted({step for found, _ in layers.values() for step in found.tolist()})
        table = np.full((len(layers), len(steps)), np.nan)
        for row, (found, values) in enumerate(layers.values()):
            table[row, np.searchsorted(steps, found)] = values
        kept = np.isfinite(table).any(axis=0) if len(layers) else np.zeros(0, dtype=bool)
        if not kept.any():
            continue
        anything = anything or bool(np.nanmax(table) > 0)
        at, table = np.array(steps)[kept], table[:, kept]
        axes.fill_between(at, np.nanmin(table, axis=0), np.nanmax(table, axis=0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(at, np.nanmean(table, axis=0), color=colour, linewidth=1.6, marker="o" if len(at) < 3 else "", markersize=4, label=label)
    if not anything:
        return None
    tidy(axes, title, y=unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.set_ylim(bottom=0)
    if len(curves) > 1:
        axes.legend(fontsize=9, frameon=False)
    return Picture(path=save(drawn, folder / f"{name}.png"), caption=caption)
