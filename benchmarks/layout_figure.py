"""How `benchmarks/layouts.py` shows its rows: a line for each when it is measured, what follows from several, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 34
"""Columns of a row's name."""


def show(row: dict[str, Any]) -> None:
    """Print one row."""
    print(f"{row['group']:8} {row['name']:{WIDTH}} {_figures(row)}", flush=True)


def _figures(row: dict[str, Any]) -> str:
    for key in ("skipped", "error"):
        if key in row:
            return f"{'failed: ' if key == 'error' else ''}{row[key]}"
    if "ms" in row:
        peak = "" if row["peak_gib"] is None else f", peak {row['peak_gib']:.1f} GiB"
        talk = f"communication {row['communication_ms']:.1f} ms, exposed {row['exposed_ms']:.1f} ms"
        if "offload_exposed_ms" in row:
            talk += f", waited {row['offload_exposed_ms']:.1f} ms for the host"
        speed = f"{row['ms']:9.1f} ms {row['tokens_per_second']:9,.0f} tokens/s {row['tflops_a_rank']:6.1f} TFLOP/s a rank"
        return f"{speed}, {talk}{peak}"
    if "sites" in row:
        said = f"{row['tokens_per_second']:9,.0f} tokens/s ({row['local_tokens_per_second']:,.0f} between outer steps)"
        if "bytes" not in row:
            return said
        first = row["bytes"][0]
        moved = f"{first['sent'] / first['rounds'] / 2**20:.2f} MiB sent, {first['payload'] / first['rounds'] / 2**20:.2f} payload"
        as_said = "as the formula" if row["holds"] else "NOT the formula"
        return f"{said}, outer step {row['outer_seconds']:.3f} s, a site's: {moved}, {as_said}"
    if "tensors" in row:
        return f"{row['tensors']} tensors, {'all the same bits' if row['holds'] else 'DIFFERENT: ' + ', '.join(row['differ'][:3])}"
    off = (
        f"loss within {row['loss']:.1e} (limit {row['tolerance_loss']:.1e}), norm {row['grad_norm']:.1e} ({row['tolerance_grad_norm']:.1e})"
    )
    return f"{off}{'' if row['holds'] else ' NOT EQUAL'}"


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Weak scaling (tokens/s over those of as many single GPUs), shares of exposed communication, speed of sites over one; and lines."""
    done = {row["name"]: row for row in rows if "tokens_per_second" in row}
    scaling, exposed, sites, lines = {}, {}, {}, []
    for name, row in done.items():
        if row.get("base") in done:
            scaling[name] = row["tokens_per_second"] / (row["ranks"] * done[row["base"]]["tokens_per_second"])
            lines.append(f"{name}: {scaling[name]:.1%} of {row['ranks']} times {row['base']}")
        if row.get("ranks", 1) > 1:
            exposed[name] = row["exposed_ms"] / row["profiled_ms"]
            told = f"{row['exposed_ms']:.1f} of {row['profiled_ms']:.1f} ms of the profiled step, {exposed[name]:.1%}"
            lines.append(f"{name}: communication that nothing hides {told}")
        if row["group"] == "sites" and row["sites"] > 1 and "one site" in done:
            sites[name] = row["tokens_per_second"] / done["one site"]["tokens_per_second"]
            lines.append(f"{name}: {sites[name]:.2f} times one site's tokens/s, of {row['sites']}")
    equal = [row for row in rows if "holds" in row]
    if equal:
        lines.append(f"equal: {sum(row['holds'] for row in equal)} of {len(equal)} rows that compare")
    failed, skipped = ([row["name"] for row in rows if key in row] for key in ("error", "skipped"))
    lines += [f"failed: {'; '.join(failed)}"] if failed else []
    lines += [f"not begun: {'; '.join(skipped)}"] if skipped else []
    return {"weak_scaling": scaling, "exposed_share": exposed, "over_one_site": sites, "lines": lines}


def draw(rows: Sequence[dict[str, Any]], device: str, path: Path) -> bool:
    """Tokens/s and the parts of a step of the 1.3 B model, tokens/s of sites; False when there is nothing to draw."""
    from train.report.style import BLUE, ORANGE, figure, save, tidy

    speeds = [row for row in rows if "ms" in row]
    sites = [row for row in rows if row["group"] == "sites" and "tokens_per_second" in row]
    panels = [kind for kind, found in (("rate", speeds), ("parts", speeds), ("sites", sites)) if found]
    if not panels:
        return False
    told = summary(rows)
    drawn = figure(5.2 * len(panels), 1.4 + 0.42 * max(len(speeds), len(sites)))
    for number, kind in enumerate(panels):
        axes = drawn.add_subplot(1, len(panels), number + 1)
        shown = sites if kind == "sites" else speeds
        places = range(len(shown))
        if kind == "parts":
            hidden = [row["profiled_ms"] - row["exposed_ms"] for row in shown]
            axes.barh(places, hidden, height=0.6, color=BLUE, label="the rest of the step")
            axes.barh(places, [row["exposed_ms"] for row in shown], left=hidden, height=0.6, color=ORANGE, label="exposed communication")
            axes.legend(fontsize=8.5, frameon=False)
            tidy(axes, "The profiled step", x="milliseconds")
        else:
            rates = [row["tokens_per_second"] for row in shown]
            axes.barh(places, rates, height=0.6, color=BLUE)
            for place, row in zip(places, shown, strict=True):
                share = told["weak_scaling"].get(row["name"])
                times = told["over_one_site"].get(row["name"])
                text = f"{share:.0%}" if share is not None else f"{times:.2f}x" if times is not None else ""
                axes.annotate(text, (rates[place], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)
            axes.margins(x=0.15)
            tidy(axes, f"{'Sites' if kind == 'sites' else 'Weak scaling'}, {device}", x="tokens/s, all devices")
        axes.set_yticks(places, [row["name"] for row in shown])
        axes.invert_yaxis()
    save(drawn, path)
    return True
