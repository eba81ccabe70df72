"""The report's HTML: one page, no script, nothing fetched; the pictures lie beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from train.report.curves import Picture
from train.report.summary import Row

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1180px; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
.status { color: #555; margin-top: .2rem; }
table { border-collapse: collapse; } td { padding: .2rem .9rem .2rem 0; vertical-align: top; border-bottom: 1px solid #eee; }
td.value { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } td.note { color: #666; }
code, td.key, td.set { font: 13.5px/1.5 ui-monospace, monospace; } td.set { overflow-wrap: anywhere; }
.pictures { display: flex; flex-wrap: wrap; gap: 1.2rem; align-items: flex-start; }
figure { margin: 0; max-width: 100%; } figure.half { flex: 0 1 calc(50% - .6rem); min-width: 320px; } figure.whole { flex: 1 1 100%; }
img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: .9rem; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; } summary { cursor: pointer; }
""".strip()


@dataclass(frozen=True)
class Section:
    """A table, pictures and links under one heading; a page leaves out a section that has none of them."""

    title: str
    pictures: Sequence[Picture] = ()
    rows: Sequence[Row] = ()
    links: Sequence[tuple[str, str]] = ()
    """(Address relative to the page, words)."""

    def __bool__(self) -> bool:
        return bool(self.pictures or self.rows or self.links)


def _picture(picture: Picture) -> str:
    width = "whole" if picture.path.name == "loss.png" else "half"
    name, caption = escape(picture.path.name), escape(picture.caption)
    return f'<figure class="{width}"><img src="{name}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def _figures(rows: Sequence[Row]) -> str:
    cells = (
        f'<tr><td>{escape(row.name)}</td><td class="value">{escape(row.value)}</td><td class="note">{escape(row.note)}</td></tr>'
        for row in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.rows:
        parts.append(_figures(section.rows))
    if section.pictures:
        pictures = "\n".join(map(_picture, section.pictures))
        parts.append(f'<div class="pictures">{pictures}</div>')
    links = " · ".join(f'<a href="{escape(address)}">{escape(words)}</a>' for address, words in section.links)
    return "".join([*parts, f"<p>{links}</p>" if links else ""])


def _configuration(rows: Sequence[Row]) -> str:
    cells = (f'<tr><td class="key">{escape(row.name)}</td><td class="set">{escape(row.value)}</td></tr>' for row in rows)
    return f"<table>{''.join(cells)}</table>"


def render(
    title: str, status: str, figures: Sequence[Row], sections: Sequence[Section], configuration: Sequence[Row], sample: str | None
) -> str:
    """The whole page as text."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)}</h1><p class="status">{escape(status)}</p>',
        f"<h2>Figures</h2>{_figures(figures)}",
    ]
    parts += map(_section, filter(None, sections))
    if sample is not None:
        parts.append(f"<h2>Sample</h2><pre>{escape(sample)}</pre>")
    parts.append(f"<h2>Configuration</h2><details><summary>All keys</summary>{_configuration(configuration)}</details>")
    parts.append("</body></html>\n")
    return "\n".join(parts)
