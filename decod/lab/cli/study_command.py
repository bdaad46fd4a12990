"""`decod lab study`: experiments with real hosts on this machine, beside published ones."""

import click

from decod.cli.printing import json_text


@click.group(no_args_is_help=True)
def study() -> None:
    """Repeat a published study with real hosts on this machine.

    \b
    Examples:
      decod lab study hivemind-thesis --quick
    """


@study.command("hivemind-thesis")
@click.option("--quick", is_flag=True, help="Run a part of the grid, in a few minutes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def hivemind_thesis(*, quick: bool, as_json: bool) -> None:
    """Train a small ResNet with 1 to 8 hosts, and compare with a thesis on hivemind.

    \b
    Examples:
      decod lab study hivemind-thesis --quick
      decod lab study hivemind-thesis --json > study.json

    The grid is that of A. D. Castro Tenemaya, Analyzing Performance Bottlenecks in Collaborative
    Deep Learning: hosts, target batch size, local updates, accumulation. Hosts are processes of
    this machine, one experiment after another. Nothing is downloaded.
    """
    from decod.lab.study.grid import full_grid, quick_grid
    from decod.lab.study.study_report import to_json, to_text
    from decod.lab.study.study_runs import run_grid

    points = quick_grid() if quick else full_grid()
    results = run_grid(points, lambda line: click.echo(line, err=True))
    click.echo(json_text(to_json(results)) if as_json else to_text(results))
