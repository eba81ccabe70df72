"""`write_report(run_dir)`: reads a run's files, draws its pictures, writes one HTML page beside them. Needs no GPU."""

from pathlib import Path

from train.config.compose import load_config
from train.config.errors import ConfigError
from train.config.place import site_dirs
from train.report.curves import curve_pictures, loss_picture
from train.report.experts import expert_pictures
from train.report.files import bigram_of, facts_of, make_folder, metrics_of, sample_of, status_words, write_page
from train.report.page import Section, render
from train.report.patterns import pattern_pictures
from train.report.sites import router_pictures
from train.report.summary import configuration_rows, figure_rows
from train.report.whole import write_whole


def write_reports(run_dir: Path) -> list[Path]:
    """Write the report of a run, of several sites one for all and one for each that has begun; return the pages' paths, the run's first.

    Raises ConfigError like `write_report`.
    """
    run_dir = Path(run_dir)
    places = site_dirs(run_dir)
    if places == [run_dir]:
        return [write_report(run_dir)]
    pages, refused = [], None
    for place in places:
        try:
            pages.append(write_report(place))
        except ConfigError as error:
            refused = error
    if refused is not None and not pages:
        raise refused
    return [write_whole(run_dir, places), *pages]


def write_report(run_dir: Path) -> Path:
    """Write `<run_dir>/report/index.html` and its PNGs, replacing older ones; return the page's path.

    Raises ConfigError (one line) when the run, its configuration or its metrics are not there.
    """
    run_dir = Path(run_dir)
    metrics = metrics_of(run_dir)
    config = load_config(run_dir / "config.yaml")
    facts = facts_of(run_dir)
    folder = make_folder(run_dir)
    loss = loss_picture(metrics, folder, bigram_of(metrics, facts))
    sections = [
        Section("Training", ([loss] if loss else []) + curve_pictures(metrics, folder)),
        Section("Attention", pattern_pictures(config, folder)),
        Section("Experts", expert_pictures(metrics, folder)),
        Section("Routers", router_pictures(metrics, folder)),
    ]
    text = render(
        title=config.run.name or run_dir.resolve().name,
        status=status_words(facts),
        figures=figure_rows(config, metrics, bigram_of(metrics, facts)),
        sections=sections,
        configuration=configuration_rows(config),
        sample=sample_of(run_dir),
    )
    return write_page(folder, text)
