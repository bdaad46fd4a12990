"""`decod why`: why a node is idle, a run slow, or a node was removed, in words."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.error_lines import print_warning
from decod.cli.node_options import state_dir_option
from decod.cli.standard_output import json_text
from decod.paths import full_path
from decod.texts import clean_text

if TYPE_CHECKING:
    from decod.insight.why_evidence import Explanation

SCHEMA_VERSION = 1
"""Of the JSON object. It grows when a field changes its meaning or goes away."""

_TEXT_MAX_CHARACTERS = 1000
_TITLES = {"idle": "IDLE", "slow": "SLOW", "removed": "REMOVED"}


@click.command()
@click.argument(
    "question", required=False, type=click.Choice(["idle", "slow", "removed"]), metavar="[QUESTION]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@state_dir_option
def why(*, question: str | None, as_json: bool, state_dir: Path) -> None:
    """Say why this node is idle, why its run is slow, or why it was removed.

    \b
    Examples:
      decod why               what applies now
      decod why idle
      decod why slow
      decod why removed --json

    Each answer is a cause, the figures that support it, and one remedy. They come from the node's
    log, its metrics, and its status if it runs. If these don't tell, the answer says so.
    """
    from decod.insight.why import answers_of
    from decod.insight.why_evidence import WhyQuestion, records_of

    records = records_of(full_path(state_dir))
    answers = answers_of(records, None if question is None else WhyQuestion(question))
    if as_json:
        click.echo(json_text(to_json(answers, records.unread)))
        return
    for unread in records.unread:
        print_warning(f"not read, so not counted: {unread}")
    if not answers:
        click.echo("nothing to explain: the node works, the run is not slow, and nobody removed it")
    for answer in answers:
        click.echo("\n".join(_lines_of(answer)))


def to_json(answers: Sequence["Explanation"], unread: Sequence[str]) -> dict[str, Any]:
    """Return answers as one JSON object.

    Args:
        answers: The answers.
        unread: What could not be read, and why.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "answers": [{**asdict(answer), "remedy": answer.remedy or None} for answer in answers],
        "unread": list(unread),
    }


def _lines_of(answer: "Explanation") -> list[str]:
    """Return an answer for a terminal. Texts of other nodes are cleaned."""
    title = click.style(f"{_TITLES[answer.question]:<8}", bold=True)
    unsure = "" if answer.known else " (the records don't tell the whole cause)"
    lines = [f"{title} {_clean(answer.cause)}.{unsure}"]
    lines += [f"         {_clean(figure.text)}" for figure in answer.figures]
    if answer.remedy:
        lines.append(f"         Try: {_clean(answer.remedy)}.")
    return lines


def _clean(text: str) -> str:
    return clean_text(text, limit=_TEXT_MAX_CHARACTERS)
