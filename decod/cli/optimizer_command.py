"""`decod optimizer`: runs of the collaborative optimizer, from outside of the training script."""

from pathlib import Path
from typing import Any

import click

from decod.cli.printing import json_text
from decod.cli.status_command import ANSWER_TIMEOUT_S
from decod.errors import NotRunningError
from decod.exit_codes import ExitCode

ROUNDS_MAX = 100_000
"""Rounds that are simulated: this takes hours."""


@click.group()
def optimizer() -> None:
    """Show a run of the collaborative optimizer, or simulate one.

    \b
    Examples:
      decod optimizer status
      decod optimizer simulate --peers 16 --rounds 100
    """


@optimizer.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each script.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="State folder that the script has chosen. Absent: all scripts that have chosen none.",
)
def status(*, as_json: bool, state_dir: Path | None) -> int:
    """Show the runs in which training scripts on this host take part.

    \b
    Examples:
      decod optimizer status
      decod optimizer status --json
      decod optimizer status --state-dir /tmp/one

    Exits with 7 if no script with decod.CollaborativeOptimizer runs here.
    """
    from decod.daemon.control import ask
    from decod.daemon.peer.peer_entry import folders_in_use

    folders = [state_dir] if state_dir is not None else folders_in_use()
    if not folders:
        raise NotRunningError(
            "no script with decod.CollaborativeOptimizer runs on this host",
            why="none of its state folders is in use",
            fix="start one, or name its state_dir with --state-dir",
            code="E-RUN-044",
        )
    for index, folder in enumerate(folders):
        answer = ask(folder, {"command": "status"}, timeout_s=ANSWER_TIMEOUT_S)
        if as_json:
            click.echo(json_text({**answer, "state_dir": str(folder)}))
        else:
            if index:
                click.echo()
            _print_status(answer, folder)
    return ExitCode.OK


def _print_status(answer: dict[str, Any], folder: Path) -> None:
    target = answer["target_batch_size"]
    samples = answer["samples"]
    own = answer["coordinator"] == answer["node_id"]
    # Only who has the run's state coordinates others.
    role = ("coordinates" if answer["level"] else "looks for others") if own else "takes part"
    lines = {
        "run": f"{answer['run']}, round {answer['round']}",
        "hosts": f"{answer['num_peers']}; this one {role}",
        "next average": f"{answer['num_samples']} of {target} samples"
        + (", averaging now" if answer["averaging"] else ""),
        "speed": f"{answer['samples_per_s']:.1f} samples/s of all hosts",
        "state": "as the run's" if answer["level"] else "loading the run's state",
        "own samples": f"{samples['applied']} in averages, {samples['outstanding']} outstanding, "
        f"{samples['dropped']} dropped, {samples['lost']} lost",
        "state folder": str(folder),
    }
    for name, text in lines.items():
        click.echo(f"{name + ':':14} {text}")


@optimizer.command()
@click.option("--peers", "num_peers", type=click.IntRange(1, 256), default=8, show_default=True)
@click.option(
    "--rounds", "num_rounds", type=click.IntRange(1, ROUNDS_MAX), default=100, show_default=True
)
@click.option(
    "--churn",
    type=click.FloatRange(0.0, 1.0),
    default=0.1,
    show_default=True,
    help="Share of the hosts that vanish in a round. As many come.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def simulate(*, num_peers: int, num_rounds: int, churn: float, seed: int, as_json: bool) -> int:
    """Play a run in virtual time, with the code that real hosts run, and uneven hosts.

    \b
    Examples:
      decod optimizer simulate --peers 16 --rounds 100
      decod optimizer simulate --peers 64 --rounds 20 --churn 0 --json
    """
    from decod.sim.collaboration import Collaboration, CollaborationSpec

    spec = CollaborationSpec(num_peers=num_peers, num_rounds=num_rounds, churn=churn, seed=seed)
    found = Collaboration(spec).run().summary()
    if as_json:
        click.echo(json_text(found))
    else:
        for name, value in found.items():
            click.echo(f"{name.replace('_', ' ') + ':':24} {value:g}")
    return ExitCode.OK
