"""What a site's report says of the others: bytes of the outer steps beside the formula, and how alike the sites' routers are."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from train.federation.accounting import SiteAccount, account_of
from train.report.curves import Picture
from train.report.page import Section
from train.report.style import BLUE, GREY, ORANGE, VERMILLION, figure, save, tidy
from train.report.summary import Row
from train.tracking.readers import RunMetrics

if TYPE_CHECKING:
    from train.report.whole import Whole


def traffic_section(whole: "Whole") -> Section:
    """Bytes of every site's outer steps, counted and by both formulas, with the parameters of its checkpoint's index."""
    places = [whole.run_dir / "sites" / str(site) for site in whole.metrics]
    accounts = [moved for place in places if (moved := account_of(place)) is not None]
    note = (
        "Payload is what a site hands over and gets back, ring what a bandwidth-optimal sum sends: different figures for the same run. "
        "Counts are those of the collectives; the formula's parameters are from the index of each site's newest checkpoint."
    )
    head = [Row(name="counted and by formula", value="", note=note)] if accounts else []
    return Section("Bytes between sites", [], head + [row for moved in accounts for row in _rows(moved)])


def _rows(moved: SiteAccount) -> list[Row]:
    site, steps = f"site {moved.site}", f"{moved.rounds:,} outer steps of {moved.sync_every} local steps"
    rows = [
        Row(
            name=f"{site}: payload",
            value=f"{moved.payload:,}",
            note=f"formula {moved.formula_payload:,.0f}, counted / formula {moved.payload_ratio:.4f}; {steps}",
        ),
        Row(
            name=f"{site}: sent",
            value=f"{moved.sent:,}",
            note=f"ring formula {moved.formula_ring:,.0f}, counted / formula {moved.ring_ratio:.4f}; {moved.received:,} received",
        ),
    ]
    return rows + [Row(name=f"{site}: to bear in mind", value="", note=caveat) for caveat in moved.caveats]


def routers_section(whole: "Whole") -> Section:
    """How alike the sites' routers are, by the first site's metrics (every site logs the same), and how that site routes."""
    for metrics in whole.metrics.values():
        return Section("Routers", router_pictures(metrics, whole.folder))
    return Section("Routers")


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
