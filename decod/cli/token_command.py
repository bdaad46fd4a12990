"""`decod token`: makes, lists and revokes the join tokens of a run, at one of its data nodes."""

from pathlib import Path
from typing import Any

import click

from decod.cli.error_lines import print_warning
from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType
from decod.cli.standard_output import json_text
from decod.texts import clean_text, span

_TIMEOUT_S = 10.0
_DAY_S = 86_400.0


@click.group(no_args_is_help=True)
def token() -> None:
    """Make, list and revoke join tokens.

    \b
    Examples:
      decod token create
      decod token create --role data --uses 1
      decod token list
      decod token revoke abcd2345

    Whoever has a token may join the run. It is part of a join string. decod never keeps its secret,
    so a join string can't be shown a second time.
    """


@token.command()
@click.option("--role", type=click.Choice(["volunteer", "data"]), default="volunteer")
@click.option(
    "--ttl",
    "ttl_s",
    type=DurationType(minimum_s=1.0, maximum_s=30 * _DAY_S),
    default="24h",
    help="How long it lets nodes in, at most 30d.",
    show_default=True,
)
@click.option(
    "--uses",
    type=click.IntRange(1, 1000),
    default=20,
    help="How many nodes may join with it.",
    show_default=True,
)
@click.option("--note", default="", help="For you: decod token list shows it.")
@click.option(
    "--print-join-command", is_flag=True, help="Print the whole command that the other side runs."
)
@state_dir_option
def create(*, state_dir: Path, print_join_command: bool, **asked: Any) -> None:
    """Make a token; print a join string that holds it.

    \b
    Examples:
      decod token create
      decod token create --ttl 7d --uses 100 --note "the chess club"
      decod token create --role data --uses 1 --print-join-command

    A data node must run on this host. Only the host that has started the run can invite data nodes.
    """
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "token_create", **asked}, timeout_s=_TIMEOUT_S)
    _warn_if_unshared(answer)
    shown = answer.get("command" if print_join_command else "join_string")
    click.echo(clean_text(shown, limit=10_000))


@token.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@state_dir_option
def list_(*, as_json: bool, state_dir: Path) -> None:
    """List the run's tokens, the latest first. What is shown lets nobody in.

    \b
    Examples:
      decod token list
      decod token list --json
    """
    from decod.daemon.control import ask

    tokens = ask(state_dir, {"command": "token_list"}, timeout_s=_TIMEOUT_S).get("tokens", [])
    if as_json:
        click.echo(json_text(tokens))
        return
    if not tokens:
        click.echo("no tokens")
        return
    click.echo(f"{'ID':<8}  {'ROLE':<9}  {'STATE':<7}  {'USED':>9}  {'EXPIRES IN':>10}  NOTE")
    for each in tokens:
        used = f"{each['used']}/{each['uses']}"
        left = span(each["expires_in_s"]) if each["state"] in ("live", "used up") else "-"
        line = f"{clean_text(each['id']):<8}  {clean_text(each['role']):<9}  "
        line += f"{clean_text(each['state']):<7}  {used:>9}  {left:>10}  "
        click.echo((line + clean_text(each["note"], limit=200)).rstrip())


@token.command()
@click.argument("token_id", metavar="ID")
@state_dir_option
def revoke(token_id: str, state_dir: Path) -> None:
    """Let nobody in with a token from now on. Those who joined with it stay.

    \b
    Examples:
      decod token revoke abcd2345
    """
    from decod.daemon.control import ask

    answer = ask(state_dir, {"command": "token_revoke", "id": token_id}, timeout_s=_TIMEOUT_S)
    _warn_if_unshared(answer)
    click.echo(f"token {clean_text(token_id)} lets nobody in any more")


def _warn_if_unshared(answer: dict[str, Any]) -> None:
    """Warn if the leader, who counts the uses of tokens, does not know of a change yet."""
    if why := answer.get("unshared"):
        print_warning(f"the leader will hear of this later ({clean_text(why, limit=400)})")
