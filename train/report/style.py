"""How every picture looks: light background, readable labels, the Okabe-Ito colours, which stay apart for colour-blind readers."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, VERMILLION, PURPLE, BLACK = "#0072B2", "#E69F00", "#D55E00", "#CC79A7", "#222222"
GREY, PALE = "#8a8a8a", "#ececec"
_DPI = 130


def figure(width: float = 6.4, height: float = 3.6) -> Figure:
    """An empty figure, in inches, whose parts make room for each other."""
    return Figure(figsize=(width, height), dpi=_DPI, facecolor="white", layout="constrained")


def tidy(axes: Axes, title: str, x: str = "step", y: str = "") -> None:
    """Title, axis names with units, light grid, no box."""
    axes.set_title(title, loc="left", fontsize=11, color=BLACK)
    axes.set_xlabel(x, fontsize=9.5)
    axes.set_ylabel(y, fontsize=9.5)
    axes.tick_params(labelsize=9, color=GREY)
    axes.grid(True, color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


def save(drawn: Figure, path: Path) -> Path:
    """Write the PNG in one step, so that a reader never sees half of it."""
    part = path.with_suffix(".part")
    drawn.savefig(part, format="png")
    part.replace(path)
    return path
