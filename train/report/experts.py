"""Pictures of how evenly the router spreads the tokens: a heat map of each Mixture-of-Experts layer's load over the steps."""

from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator

from train.report.curves import Picture
from train.report.style import figure, save, tidy
from train.tracking.readers import RunMetrics

MOST_COLUMNS = 400  # more steps than pixels are averaged


def layer_loads(metrics: RunMetrics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Layer name to steps (n,) and loads (n, experts), each load times the number of experts: 1 is an even share."""
    seen: dict[str, tuple[list[float], list[list[float]]]] = {}
    for line in metrics.training:
        loads = line.get("expert_load")
        if not isinstance(loads, dict):
            continue
        for layer, shares in loads.items():
            steps, rows = seen.setdefault(layer, ([], []))
            if rows and len(shares) != len(rows[0]):
                continue  # another number of experts than the layer began with: not the same experts
            steps.append(float(line["step"]))
            rows.append([float(share) for share in shares])
    order = sorted(seen, key=lambda layer: (not layer.isdigit(), int(layer) if layer.isdigit() else 0, layer))
    return {layer: (np.array(seen[layer][0]), np.array(seen[layer][1]) * len(seen[layer][1][0])) for layer in order}


def binned(steps: np.ndarray, loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MOST_COLUMNS neighbouring lines averaged into one: their first steps and mean loads."""
    parts = np.array_split(np.arange(len(steps)), min(MOST_COLUMNS, len(steps)))
    return np.array([steps[part[0]] for part in parts]), np.array([loads[part].mean(axis=0) for part in parts])


def _edges(steps: np.ndarray) -> np.ndarray:
    """Left edges of the columns and the right edge of the last, which is as wide as the one before."""
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1.0
    return np.append(steps, steps[-1] + width)


def expert_pictures(metrics: RunMetrics, folder: Path) -> list[Picture]:
    """One heat map for each layer that logged its load; none for a dense model."""
    return [_picture(layer, steps, loads, folder) for layer, (steps, loads) in layer_loads(metrics).items()]


def _picture(layer: str, steps: np.ndarray, loads: np.ndarray, folder: Path) -> Picture:
    columns, values = binned(steps, loads)
    experts = values.shape[1]
    drawn = figure(6.4, min(8.0, max(3.6, 2.2 + 0.16 * experts)))
    axes = drawn.add_subplot()
    norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(np.nanmax(values))))
    mesh = axes.pcolormesh(_edges(columns), np.arange(experts + 1) - 0.5, values.T, cmap="PuOr_r", norm=norm, rasterized=True)
    tidy(axes, f"Expert load, layer {layer}", y="expert")
    axes.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(experts, 10)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.invert_yaxis()
    bar = drawn.colorbar(mesh, ax=axes, pad=0.02, aspect=30)
    bar.set_label("share of an even load", fontsize=9)
    bar.ax.tick_params(labelsize=8.5)
    last = loads[-1]
    caption = f"Tokens that each expert of layer {layer} receives; 1 is an even share. Last: {last.min():.2f} to {last.max():.2f}."
    return Picture(path=save(drawn, folder / f"expert_load_layer_{layer}.png"), caption=caption)
