"""`decod analyse`: what holds a run back, and what would help."""

from pathlib import Path

import click

from decod.cli.standard_output import json_text


@click.command()
@click.argument("paths", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Also draw plots into this folder. Needs matplotlib.",
)
@click.option("--run", metavar="ID", help="Which run, by its id or the beginning of it.")
@click.option(
    "--rounds",
    "rounds_max",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    metavar="N",
    help="How many of the newest rounds to look at.",
)
def analyse(
    paths: tuple[Path, ...], *, as_json: bool, plots: Path | None, run: str | None, rounds_max: int
) -> None:
    """Say what holds a run back, by how much, and what would help.

    \b
    Examples:
      decod analyse ~/.local/state/decod
      decod analyse collected/            files of several peers
      decod analyse journal.jsonl --json
      decod analyse collected/ --plots figures/

    RUN is a node's state folder, a file of its journal, or a folder with those of several peers.
    Each peer records only what it sees itself: collect the folder `journal` of all state folders
    for the whole picture. No daemon is asked.
    """
    from decod.insight.analysis_report import report_of, select, text_of
    from decod.insight.plots import check_plots, draw_plots
    from decod.insight.round_files import read_records

    if plots is not None:
        check_plots(plots)
    records = read_records(paths)
    selection = select(records, run=run, rounds_max=rounds_max)
    report = report_of(selection, records.problems)
    click.echo(json_text(report.to_json()) if as_json else text_of(report))
    if plots is not None:
        for path in draw_plots(selection, report, plots):
            click.echo(f"drawn: {path}", err=True)
