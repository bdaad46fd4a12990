"""The tables that `decod status` draws on a terminal.

Names, messages and addresses come from peers. They are cleaned, and never interpreted as markup.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from decod.obs.text import clean_text

NUM_NODES_SHOWN_MAX = 64
"""With more nodes, the table has only one row for each stage."""

NUM_RECENT_SHOWN_MAX = 5

_PLAIN_WIDTH = 120
"""Width of output that is no terminal: a log file, a pipe."""

_OUTBOUND = "outbound"
"""As `Reach.OUTBOUND` is written."""

_STATE_STYLES = {
    "training": "green",
    "aggregating": "green",
    "finished": "green",
    "gathering": "yellow",
    "waiting": "red",
    "paused": "yellow",
    "reconnecting": "yellow",
    "draining": "yellow",
    "stopped": "red",
}


def make_console() -> Console:
    """Return a console on stdout. Rich itself obeys NO_COLOR."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def render_status(status: Mapping[str, Any], *, flows: bool = False) -> RenderableType:
    """Return a line each for run and node, and tables of stages and, if wanted, flows."""
    parts: list[RenderableType] = [_run_line(status), _node_line(_mapping(status, "node"))]
    if status.get("message"):
        routine = status.get("run_state") in {"training", "aggregating", "finished"}
        parts.append(Text(clean_text(status["message"]), style="" if routine else "yellow"))
    if (contributed := _mapping(status, "contributed")).get("num_microbatches"):
        data = _mapping(status, "node").get("role") == "data"
        parts.append(_contributed_line(contributed, data=data))
    if (audits := _mapping(status, "audits")).get("num_worked"):
        parts.append(_audits_line(audits))
    if (sync := _mapping(status, "sync")).get("method") == "diloco":
        parts.append(_sync_line(sync))
    if syncing := _mapping(status, "syncing"):
        parts.append(_syncing_line(syncing))
    parts += [_recent_line(one) for one in _sequence(status, "recent")[-NUM_RECENT_SHOWN_MAX:]]
    parts.append(Text())
    parts.append(_stage_table(_sequence(status, "stages")))
    if flows:
        parts += [Text(), _flow_table(_sequence(status, "flows"), _names(status))]
    candidates = _sequence(status, "candidates")
    if candidates:
        waiting = ", ".join(_who(candidate) for candidate in candidates[:8])
        more = f" and {len(candidates) - 8} more" if len(candidates) > 8 else ""
        parts.append(Text(f"waiting to enter: {waiting}{more}"))
    parts += _checkpoint_lines(_mapping(status, "checkpoint"))
    if problem := _mapping(status, "states").get("problem"):
        text = f"this host's disk: {clean_text(problem, limit=500)}"
        parts.append(Text(text, style="yellow"))
    if status.get("join_string"):
        join_string = clean_text(status["join_string"], limit=10_000)
        # Whatever the terminal's width: a line that is broken can't be copied.
        line = f"join with: decod join {join_string}"
        parts.append(Text(line, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _contributed_line(contributed: Mapping[str, Any], *, data: bool) -> Text:
    """Return a line on what a node, perhaps a data node, has contributed, and who says so."""
    num, tokens = contributed.get("num_microbatches"), contributed.get("num_tokens")
    million = 1e-6 * tokens if isinstance(tokens, int | float) else None
    line = f"contributed: {_number(num, ',')} microbatches, {_number(million, ',.1f')} M tokens"
    vouched = contributed.get("num_vouched")
    if data:
        said = "its own word"
    else:
        said = "vouched for" if vouched == num else f"{_number(vouched, ',')} vouched for"
    return Text(f"{line} ({said})")


def _audits_line(audits: Mapping[str, Any]) -> Text:
    """Return a line on how much of the relays' work was done again, and what came of it."""
    num, worked = audits.get("num_audited"), audits.get("num_worked")
    share = None
    if isinstance(num, int) and isinstance(worked, int) and worked:
        share = 100 * num / worked
    chances = _mapping(audits, "chances")
    odds = ", ".join(
        f"{_number(100 * chance, '.0f')} % after {clean_text(lies)}"
        for lies, chance in chances.items()
        if isinstance(chance, int | float)
    )
    liars = _mapping(audits, "liars")
    found = f"{len(liars)} liars found" if len(liars) != 1 else "1 liar found"
    waited = _number(audits.get("waited_s"), ",.0f")
    line = (
        f"audited: {_number(share, '.1f')} % of relays' work, {found}; waited {waited} s for that"
    )
    return Text(f"{line}. A relay that lies is caught: {odds} lies", style="red" if liars else "")


def _sync_line(sync: Mapping[str, Any]) -> Text:
    """Return a line on how often members average, how finely, and how long that takes."""
    parts = [f"averaging every {_text(sync, 'every')} iterations"]
    num_fragments = sync.get("fragments")
    if isinstance(num_fragments, int) and num_fragments > 1:
        parts.append(f"in {num_fragments} fragments")
    if sync.get("rank"):
        parts.append(f"rank {_text(sync, 'rank')}")
    bits = sync.get("bits")
    parts.append(f"{_text(sync, 'bits')} bits" if bits else _text(sync, "compression"))
    line = ", ".join(parts)
    if sync.get("travel_s") and sync.get("budget_s"):
        taken, budget = (_number(sync.get(name), ".0f") for name in ("travel_s", "budget_s"))
        line += f": {taken} s of {budget} s"
    if sync.get("num_lost"):
        line += f"; lost with members: {_text(sync, 'num_lost')} microbatches"
    return Text(line)


def _syncing_line(syncing: Mapping[str, Any]) -> Text:
    """Return a line on the state that is being fetched, and the time that is left."""
    rate = syncing.get("bytes_per_s")
    mib = rate / 2**20 if isinstance(rate, (int, float)) else None
    left = f"{_number(syncing.get('left_s'), '.0f')} s until it can take microbatches"
    why = clean_text(syncing.get("why") or "no reason was given", limit=200)
    text = (
        f"fetching the state of stage {_text(syncing, 'stage_index')} (why there: {why}): "
        f"{_number(syncing.get('percent'), '.0f')} %, {_number(mib, '.1f')} MiB/s, {left}"
    )
    return Text(text, style="yellow")


def _recent_line(one: Mapping[str, Any]) -> Text:
    """Return a line on an event that was not routine, and its age."""
    age = f"{_number(one.get('age_s'), '.0f')} s ago"
    return Text(f"{age:>9}  {clean_text(one.get('text', ''), limit=300)}", style="yellow")


def _checkpoint_lines(checkpoint: Mapping[str, Any]) -> list[RenderableType]:
    """Return lines on the last checkpoint, and in red why there is no newer one."""
    lines: list[RenderableType] = []
    if checkpoint.get("iteration") is not None:
        lines.append(Text(f"last checkpoint: iteration {_text(checkpoint, 'iteration')}"))
    if checkpoint.get("problem"):
        problem = clean_text(checkpoint["problem"], limit=500)
        lines.append(Text(f"CHECKPOINT FAILED: {problem}", style="red"))
    return lines


def _run_line(status: Mapping[str, Any]) -> Text:
    leader = _mapping(status, "leader")
    electing = ", another is being elected" if leader.get("electing") is True else ""
    pieces = [
        Text(f"run {_text(status, 'run_name')}", style="bold"),
        _state(status.get("run_state")),
        Text(f"iteration {_text(status, 'iteration')}"),
        Text(f"loss {_number(status.get('loss'), '.4f')}"),
        Text(f"{_number(status.get('tokens_per_s'), ',.0f')} tokens/s"),
        Text(f"leader {_who(leader)} (term {_text(leader, 'term')}{electing})"),
    ]
    return Text("   ").join(pieces)


def _node_line(node: Mapping[str, Any]) -> Text:
    pieces = [
        Text(f"you {_who(node)} ({_text(node, 'id')[:8]})", style="bold"),
        _state(node.get("state")),
        Text(_text(node, "role")),
        Text(f"stage {_text(node, 'stage_index')}"),
        Text(f"capacity {_text(node, 'capacity')}"),
        Text(_text(node, "device") + (" (free)" if node.get("device_free") is True else "")),
        _address(node),
    ]
    return Text("   ").join(pieces)


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("STAGE")
    table.add_column("NODE", overflow="ellipsis", max_width=32)
    table.add_column("STATE")
    for name in ("CAPACITY", "FLOWS", "DONE"):
        table.add_column(name, justify="right")
    table.add_column("ADDRESS", overflow="fold")
    num_nodes = sum(len(_sequence(stage, "nodes")) for stage in stages)
    for stage in stages:
        nodes = _sequence(stage, "nodes")
        index = _text(stage, "index") + (" data" if stage.get("index") == 0 else "")
        if num_nodes <= NUM_NODES_SHOWN_MAX and nodes:
            for position, node in enumerate(nodes):
                table.add_row("" if position else index, *_node_cells(node))
        else:
            table.add_row(index, *_summary_cells(nodes))
    return table


def _names(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the shown name of each member, by its id."""
    nodes = [node for stage in _sequence(status, "stages") for node in _sequence(stage, "nodes")]
    return {str(node.get("id")): _who(node) for node in nodes}


def _flow_table(flows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> RenderableType:
    """Return a table of flows, equal ones in one row, with the cost of each hop in milliseconds."""
    if not flows:
        return Text("no flows yet")
    rows: dict[str, tuple[float, int]] = {}
    for flow in flows:
        path, costs = flow.get("path"), flow.get("costs_s")
        if not isinstance(path, list) or not isinstance(costs, list) or not path:
            continue
        pieces = [_called(path[0], names)]
        numbers = [cost for cost in costs if isinstance(cost, int | float)]
        for node_id, cost in zip(path[1:], numbers, strict=False):
            pieces.append(f"-{_number(1e3 * cost, ',.0f')}> {_called(node_id, names)}")
        total, count = sum(numbers), rows.get(" ".join(pieces), (0.0, 0))[1]
        rows[" ".join(pieces)] = (total, count + 1)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("FLOWS", "COST ms"):
        table.add_column(name, justify="right")
    table.add_column("PATH, ms of each hop", overflow="fold")
    for text, (total, count) in sorted(rows.items(), key=lambda row: row[1][0]):
        table.add_row(str(count), _number(1e3 * total, ",.0f"), Text(text))
    return table


def _called(node_id: object, names: Mapping[str, str]) -> str:
    return names.get(str(node_id)) or clean_text(str(node_id)[:8])


def _node_cells(node: Mapping[str, Any]) -> list[str | Text]:
    counts = [_text(node, name) for name in ("capacity", "flows", "microbatches")]
    return [Text(_who(node)), _state(node.get("state")), *counts, _address(node)]


def _address(node: Mapping[str, Any]) -> Text:
    """Return a node's address; where nobody can dial it, how it is reached instead."""
    if node.get("reach") == _OUTBOUND:
        return Text(f"{_text(node, 'address')} (outbound only)", style="yellow")
    return Text(_text(node, "address"))


def _summary_cells(nodes: Sequence[Mapping[str, Any]]) -> list[str | Text]:
    if not nodes:
        return [Text("nobody", style="red"), Text("empty", style="red"), "0", "0", "0", ""]
    noun = "node" if len(nodes) == 1 else "nodes"
    counts = [clean_text(_total(nodes, name)) for name in ("capacity", "flows", "microbatches")]
    return [f"{len(nodes)} {noun}", "", *counts, ""]


def _total(nodes: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(value for node in nodes if isinstance(value := node.get(name), int))


def _state(value: object) -> Text:
    text = clean_text("?" if value is None else value)
    return Text(text, style=_STATE_STYLES.get(text, ""))


def _who(node: Mapping[str, Any]) -> str:
    return clean_text(node.get("name") or str(node.get("id") or "?")[:8])


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return "-" if value is None else clean_text(value)


def _number(value: object, form: str) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    try:
        return format(value, form)
    except OverflowError:
        # An integer too large for a float. No honest peer sends one.
        return "?"


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    return value if isinstance(value, Mapping) else {}


def _sequence(values: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    value = values.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
