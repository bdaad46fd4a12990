"""`decod token` and `node`: who may join the run of this host, who is in it, who is banned."""

from pathlib import Path
from typing import Any

import click

from decod.cli.node_options import state_dir_option
from decod.cli.options import DurationType
from decod.cli.printing import json_text, print_warning
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
def list_tokens(*, as_json: bool, state_dir: Path) -> None:
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


_YEAR_S = 366 * 86_400.0
_ID_SHOWN = 12
_TEXT_MAX_CHARACTERS = 400


@click.group(no_args_is_help=True)
def node() -> None:
    """List the run's nodes, ban one, or lift a ban.

    \b
    Examples:
      decod node list
      decod node show brave-otter
      decod node ban brave-otter --for 24h --reason "its gradients are noise"
      decod node unban brave-otter

    NODE is a node's name, its id, or the beginning of its id. The leader must run on this host.
    """


@node.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@state_dir_option
def list_nodes(*, as_json: bool, state_dir: Path) -> None:
    """List members, candidates, banned nodes, and newcomers who wait to be let in.

    \b
    Examples:
      decod node list
      decod node list --json
    """
    nodes = [*_ask(state_dir, "node_list").get("nodes", []), *_newcomers(state_dir)]
    if as_json:
        click.echo(json_text(nodes))
        return
    if not nodes:
        click.echo("no nodes yet")
        return
    click.echo(
        f"{'ID':<{_ID_SHOWN}}  {'NAME':<20}  {'ROLE':<9}  {'STAGE':>5}  {'STATE':<9}  "
        f"{'PAPERS END IN':>13}  {'ADDRESS':<21}  {'REACH':<9}  BAN"
    )
    for each in nodes:
        stage = "-" if each["stage_index"] is None else str(each["stage_index"])
        line = f"{_cell(each['id'])[:_ID_SHOWN]:<{_ID_SHOWN}}  {_cell(each['name']):<20}  "
        line += f"{_cell(each['role']):<9}  {stage:>5}  {_cell(each['state']):<9}  "
        line += f"{_left(each['papers_end_in_s']):>13}  {_cell(each['address']):<21}  "
        line += f"{_cell(each['reach']):<9}  "
        click.echo((line + _ban_of(each)).rstrip())


@node.command()
@click.argument("name", metavar="NODE")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@state_dir_option
def show(*, name: str, as_json: bool, state_dir: Path) -> None:
    """Show more of one node.

    \b
    Examples:
      decod node show brave-otter
    """
    found = _ask(state_dir, "node_show", node=name)["node"]
    if as_json:
        click.echo(json_text(found))
        return
    load = found["load"] or {}
    rows = {
        "id": found["id"],
        "name": found["name"],
        "role": found["role"],
        "state": found["state"],
        "works": load.get("state"),
        "stage": found["stage_index"],
        "address": found["address"],
        "reach": found["reach"],
        "capacity": found["capacity"],
        "flows": load.get("flows"),
        "member since iteration": found["since_iteration"],
        "papers end in": _left(found["papers_end_in_s"]),
        "ban": _ban_of(found) or None,
    }
    for label, value in rows.items():
        click.echo(f"{label + ':':<24}{_cell(value)}")


@node.command()
@click.argument("name", metavar="NODE")
@click.option(
    "--for",
    "life_s",
    type=DurationType(minimum_s=1.0, maximum_s=10 * _YEAR_S),
    default="24h",
    help="How long it must stay away.",
    show_default=True,
)
@click.option("--forever", is_flag=True, help="Until it is lifted, whatever --for says.")
@click.option("--reason", default="", help="Why: the node is told, and so are all members.")
@state_dir_option
def ban(*, name: str, life_s: float, forever: bool, reason: str, state_dir: Path) -> None:
    """Remove a node from the run, and let it in no more for a while.

    \b
    Examples:
      decod node ban brave-otter
      decod node ban brave-otter --for 7d --reason "its gradients are noise"
      decod node ban abcd2345 --forever

    All members refuse its calls from then on, usually within a second. The training goes on as if
    the node were lost. A second ban of the same node replaces the first.
    """
    asked = {"node": name, "life_s": None if forever else life_s, "reason": reason}
    done = _ask(state_dir, "node_ban", **asked)
    click.echo(f"{_cell(done['name'])} ({_cell(done['id'])}) is {_cell(done['banned'])}")


@node.command()
@click.argument("name", metavar="NODE")
@state_dir_option
def unban(*, name: str, state_dir: Path) -> None:
    """Lift a ban. The node may join again.

    \b
    Examples:
      decod node unban brave-otter
    """
    done = _ask(state_dir, "node_unban", node=name)
    click.echo(f"{_cell(done['name'])} ({_cell(done['id'])}) may join again")


@node.command()
@click.argument("name", metavar="NODE")
@state_dir_option
def accept(*, name: str, state_dir: Path) -> None:
    """Let a newcomer in that waits. Its host asks every few seconds.

    \b
    Examples:
      decod node accept abcd2345efgh

    NODE is the id that `decod node list` shows. Newcomers wait if the leader's run file has `ask =
    true` under [admission].
    """
    _decide(state_dir, name, may_enter=True)


@node.command()
@click.argument("name", metavar="NODE")
@state_dir_option
def refuse(*, name: str, state_dir: Path) -> None:
    """Send a newcomer away that waits.

    \b
    Examples:
      decod node refuse abcd2345efgh
    """
    _decide(state_dir, name, may_enter=False)


def _newcomers(state_dir: Path) -> list[dict[str, Any]]:
    """Return the hosts that wait to be let in, in the form of nodes."""
    unknown = dict.fromkeys(("role", "stage_index", "reach", "papers_end_in_s", "ban"))
    waiting = _ask(state_dir, "newcomer_list").get("newcomers", [])
    return [
        {**unknown, **{name: each[name] for name in ("id", "name", "address")}, "state": "waiting"}
        for each in waiting
    ]


def _decide(state_dir: Path, name: str, *, may_enter: bool) -> None:
    done = _ask(state_dir, "newcomer_decide", node=name, may_enter=may_enter)
    comes = "may come in" if may_enter else "is sent away"
    click.echo(f"{_cell(done['name'])} ({_cell(done['id'])}) {comes}")


def _ask(state_dir: Path, command: str, **asked: Any) -> dict[str, Any]:
    from decod.daemon.control import ask

    return ask(state_dir, {"command": command, **asked}, timeout_s=_TIMEOUT_S)


def _cell(value: Any) -> str:
    return "-" if value is None else clean_text(value, limit=_TEXT_MAX_CHARACTERS)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return span(seconds) if seconds > 0 else "ended"


def _ban_of(found: dict[str, Any]) -> str:
    return _cell(found["ban"]["text"]) if found["ban"] else ""
