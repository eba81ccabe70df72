"""The README's picture: the main pictures of a run's report on one sheet.

python scripts/demo_picture.py runs/<demo of two sites, evaluated> docs/images/demo_report.png
"""

import sys
from pathlib import Path

from PIL import Image

from train.report.write import write_reports

WIDTH, GAP = 1360, 24
ROWS = (("loss.png",), ("pattern_layer_001.png",), ("evaluation.png", "load_by_site.png"))


def sheet(report: Path) -> Image.Image:
    """The pictures of `report`, row under row, each row as wide as the sheet."""
    rows = []
    for names in ROWS:
        images = [Image.open(report / name).convert("RGB") for name in names]
        height = min(image.height for image in images)
        images = [image.resize((round(image.width * height / image.height), height), Image.Resampling.LANCZOS) for image in images]
        scale = (WIDTH - GAP * (len(images) - 1)) / sum(image.width for image in images)
        rows.append([image.resize((int(image.width * scale), int(height * scale)), Image.Resampling.LANCZOS) for image in images])
    drawn = Image.new("RGB", (WIDTH, sum(row[0].height + GAP for row in rows) - GAP), "white")
    top = 0
    for row in rows:
        left = 0
        for image in row:
            drawn.paste(image, (left, top))
            left += image.width + GAP
        top += row[0].height + GAP
    return drawn


def main() -> None:
    run, target = map(Path, sys.argv[1:3])
    target.parent.mkdir(parents=True, exist_ok=True)
    sheet(write_reports(run)[0].parent).save(target, optimize=True)


if __name__ == "__main__":
    main()
