"""The tables that `decod status` draws on a terminal.

Names, messages and addresses come from peers. They are cleaned, and never interpreted as markup.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from decod.journal.credit import credit_of
from decod.journal.told_status import (
    arrival_text,
    mapping_in,
    number_in,
    sequence_in,
    slow_texts,
)
from decod.texts import clean_text, counted, length_of

NUM_NODES_SHOWN_MAX = 64
"""The most nodes of a table with a row for each. With more, the table has only one row for each
stage."""

NUM_RECENT_SHOWN_MAX = 5

_NUM_NAMES_SHOWN_MAX = 8

_DEVICE_WIDTH_MAX = 24

_PLAIN_WIDTH = 120
"""Width of output that is no terminal: a log file, a pipe."""

_OUTBOUND = "outbound"
"""As `Reach.OUTBOUND` is written."""

_USUAL_ROLES = {"data node", "relay", "-"}
"""A stage's number says which of these its members have, so the table does not."""

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
    parts: list[RenderableType] = [_run_line(status), *_time_lines(status)]
    parts.append(node_line(mapping_in(status, "node")))
    parts += message_lines(status)
    for one in sequence_in(status, "waits"):
        so_far = length_of(number_in(one, "age_s") or 0)
        parts.append(Text(f"waiting for {text_in(one, 'what')}, for {so_far} so far"))
    parts += [Text(text, style="yellow") for text in slow_texts(status)]
    parts += _cut_lines(mapping_in(status, "cut"))
    parts += pausing_lines(mapping_in(status, "pausing"))
    parts += _work_lines(status)
    if (sync := mapping_in(status, "sync")).get("method") == "diloco":
        parts.append(_sync_line(sync))
    if syncing := mapping_in(status, "syncing"):
        parts.append(syncing_line(syncing))
    parts += [recent_line(one) for one in sequence_in(status, "recent")[-NUM_RECENT_SHOWN_MAX:]]
    parts.append(Text())
    parts.append(_stage_table(sequence_in(status, "stages")))
    if flows:
        parts += [Text(), _flow_table(sequence_in(status, "flows"), names_of(status))]
    parts += _arrival_lines(status)
    parts += checkpoint_lines(mapping_in(status, "checkpoint"))
    parts += evaluation_lines(mapping_in(status, "evaluation"))
    parts += text_lines(mapping_in(status, "texts"))
    parts += refusal_lines(mapping_in(status, "counters"))
    if (audits := mapping_in(status, "audits")).get("num_worked"):
        parts.append(_audits_line(audits))
    if problem := mapping_in(status, "states").get("problem"):
        text = f"this host's disk: {clean_text(problem, limit=500)}"
        parts.append(Text(text, style="yellow"))
    if status.get("page"):
        # Whatever the terminal's width: a line that is broken can't be copied.
        line = f"page: {clean_text(status['page'], limit=200)}"
        parts.append(Text(line, no_wrap=True, overflow="ignore"))
    if status.get("join_string"):
        join_string = clean_text(status["join_string"], limit=10_000)
        line = f"join with: decod join {join_string}"
        parts.append(Text(line, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _time_lines(status: Mapping[str, Any]) -> list[Text]:
    """Return a line on how long the run goes on already, what it has learnt from, what is left."""
    age_s = number_in(status, "age_s")
    left_s = number_in(status, "left_s")
    num_tokens = number_in(status, "num_tokens")
    pieces = []
    if age_s is not None:
        pieces.append(f"running for {length_of(age_s)}")
    if num_tokens:
        pieces.append(f"{_amount(num_tokens)} tokens so far")
    if left_s:
        pieces.append(f"about {length_of(left_s)} left")
    return [Text("   ".join(pieces))] if pieces else []


def _cut_lines(cut: Mapping[str, Any]) -> list[Text]:
    """Return a line on another cut of the model that would be faster."""
    blocks = cut.get("recommended")
    gain = number_in(cut, "gain")
    moved_bytes = number_in(cut, "moved_bytes")
    if not isinstance(blocks, list) or gain is None or moved_bytes is None:
        return []
    sizes = ", ".join(clean_text(each, limit=8) for each in blocks[:64])
    text = (
        f"stages of {sizes} blocks would suit the hosts better: the slowest one would compute"
        f" {gain:.0%} more, and {moved_bytes / 1e9:.2g} GB would move; `decod run recut` does it"
    )
    return [Text(text, style="yellow")]


def _arrival_lines(status: Mapping[str, Any]) -> list[Text]:
    """Return lines on the nodes that fetch a stage's state, and on those that wait to enter."""
    own = mapping_in(status, "node").get("id")
    fetching = [
        f"{name_of(node)} (stage {text_in(stage, 'index')})"
        for stage in sequence_in(status, "stages")
        for node in sequence_in(stage, "nodes")
        if node.get("state") == "syncing" and node.get("id") != own
    ]
    waiting = []
    for candidate in sequence_in(status, "candidates"):
        if candidate.get("id") == own:
            continue  # Its own line says so.
        if candidate.get("stage_index") is None:
            waiting.append(name_of(candidate))
        else:
            fetching.append(f"{name_of(candidate)} (stage {text_in(candidate, 'stage_index')})")
    lines = []
    if fetching:
        lines.append(Text(f"fetching their stage's state: {_some(fetching)}"))
    if waiting:
        lines.append(Text(f"waiting to enter: {_some(waiting)}"))
    return lines


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NUM_NAMES_SHOWN_MAX
    return ", ".join(names[:_NUM_NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def message_lines(status: Mapping[str, Any]) -> list[Text]:
    """Return the line on what is going on, if there is one."""
    if not status.get("message"):
        return []
    routine = str(status.get("run_state")) in {"training", "aggregating", "finished"}
    return [Text(clean_text(status["message"]), style="" if routine else "yellow")]


def pausing_lines(pausing: Mapping[str, Any]) -> list[Text]:
    """Return lines on why the node is paused, what it can't know, and what the leader refuses."""
    lines = []
    causes = sequence_in(pausing, "causes")
    person = "you have paused it, until `decod resume`" if pausing.get("by_person") is True else ""
    if person or causes:
        why = "; ".join(filter(None, (person, causes_text(causes))))
        lines.append(Text(f"paused: {why}", style="yellow"))
    if pausing.get("refusal"):
        line = f"not as wanted yet, since {clean_text(pausing['refusal'], limit=300)}"
        lines.append(Text(line, style="yellow"))
    lines += [
        Text(f"can't tell {clean_text(rule)}: {clean_text(why, limit=300)}", style="yellow")
        for rule, why in mapping_in(pausing, "unknown").items()
    ]
    return lines


def causes_text(causes: Sequence[Mapping[str, Any]]) -> str:
    """Return why a node is paused by itself, and until when if that is known."""
    said = []
    for cause in causes:
        text = clean_text(cause.get("detail") or cause.get("name") or "?", limit=300)
        if cause.get("until"):
            text += f", until {clean_text(cause['until'])[:16].replace('T', ' ')}"
        if cause.get("calm_s") is not None:
            text += f" (gone, counts for {number_text(cause['calm_s'], '.0f')} s more)"
        said.append(text)
    return "; ".join(said)


def _work_lines(status: Mapping[str, Any]) -> list[RenderableType]:
    """Return lines on what this host has done, if it has done anything."""
    lines: list[RenderableType] = []
    if (credit := mapping_in(status, "credit")).get("num_microbatches"):
        lines.append(Text(f"You did {credit_of(credit)}", style="bold"))
    if (contributed := mapping_in(status, "contributed")).get("num_microbatches"):
        data = mapping_in(status, "node").get("role") == "data"
        lines.append(_contributed_line(contributed, data=data))
    return lines


def _contributed_line(contributed: Mapping[str, Any], *, data: bool) -> Text:
    """Return a line on what a node, perhaps a data node, has contributed, and who says so."""
    num = contributed.get("num_microbatches")
    tokens = contributed.get("num_tokens")
    line = f"contributed: {number_text(num, ',')} microbatches, {_amount(tokens)} tokens"
    vouched = contributed.get("num_vouched")
    if data:
        said = "its own word"
    else:
        said = "vouched for" if vouched == num else f"{number_text(vouched, ',')} vouched for"
    return Text(f"{line} ({said})")


def _amount(number: object) -> str:
    """Return a number of tokens, in millions if there are many."""
    if isinstance(number, int | float) and number >= 1_000_000:
        return number_text(1e-6 * number, ",.1f") + " M"
    return number_text(number, ",")


def _audits_line(audits: Mapping[str, Any]) -> Text:
    """Return a line on how much of the relays' work was done again, and what came of it."""
    num = audits.get("num_audited")
    worked = audits.get("num_worked")
    share = None
    if isinstance(num, int) and isinstance(worked, int) and worked:
        share = 100 * num / worked
    chances = mapping_in(audits, "chances")
    odds = ", ".join(
        f"{number_text(100 * chance, '.0f')} % after {clean_text(lies)}"
        for lies, chance in chances.items()
        if isinstance(chance, int | float)
    )
    liars = mapping_in(audits, "liars")
    found = f"{len(liars)} liars found" if len(liars) != 1 else "1 liar found"
    waited = number_text(audits.get("waited_s"), ",.0f")
    audited = number_text(share, ".1f")
    line = f"audited: {audited} % of relays' work, {found}; waited {waited} s for that"
    return Text(f"{line}. A relay that lies is caught: {odds} lies", style="red" if liars else "")


def _sync_line(sync: Mapping[str, Any]) -> Text:
    """Return a line on how often members average, how finely, and how long that takes."""
    parts = [f"averaging every {text_in(sync, 'every')} iterations"]
    num_fragments = sync.get("fragments")
    if isinstance(num_fragments, int) and num_fragments > 1:
        parts.append(f"in {num_fragments} fragments")
    if sync.get("rank"):
        parts.append(f"rank {text_in(sync, 'rank')}")
    bits = sync.get("bits")
    parts.append(f"{text_in(sync, 'bits')} bits" if bits else text_in(sync, "compression"))
    line = ", ".join(parts)
    if sync.get("travel_s") and sync.get("budget_s"):
        taken, budget = (number_text(sync.get(name), ".0f") for name in ("travel_s", "budget_s"))
        line += f": {taken} s of {budget} s"
    if arrival := arrival_text(sync):
        line += f"; {arrival}"
    if sync.get("num_lost"):
        line += f"; lost with members: {text_in(sync, 'num_lost')} microbatches"
    return Text(line)


def syncing_line(syncing: Mapping[str, Any]) -> Text:
    """Return a line on the state that is being fetched, and the time that is left."""
    rate = syncing.get("bytes_per_s")
    mib = rate / 2**20 if isinstance(rate, (int, float)) else None
    left = f"{number_text(syncing.get('left_s'), '.0f')} s until it can take microbatches"
    why = clean_text(syncing.get("why") or "no reason was given", limit=200)
    text = (
        f"fetching the state of stage {text_in(syncing, 'stage_index')} (why there: {why}): "
        f"{number_text(syncing.get('percent'), '.0f')} %, {number_text(mib, '.1f')} MiB/s, {left}"
    )
    return Text(text, style="yellow")


def recent_line(one: Mapping[str, Any]) -> Text:
    """Return a line on an event that was not routine, and its age."""
    age = f"{number_text(one.get('age_s'), '.0f')} s ago"
    return Text(f"{age:>9}  {clean_text(one.get('text', ''), limit=300)}", style="yellow")


def evaluation_lines(evaluation: Mapping[str, Any]) -> list[Text]:
    """Return lines on the last evaluation, and why there is no newer one."""
    lines: list[Text] = []
    if last := mapping_in(evaluation, "last"):
        loss = number_text(last.get("loss"), ".4f")
        perplexity = number_text(last.get("perplexity"), ".2f")
        text = f"held-out text: loss {loss}, perplexity {perplexity}"
        lines.append(Text(f"{text}, iteration {text_in(last, 'iteration')}"))
    if evaluation.get("problem"):
        problem = clean_text(evaluation["problem"], limit=500)
        lines.append(Text(f"held-out text: {problem}", style="yellow"))
    return lines


def text_lines(texts: Mapping[str, Any]) -> list[Text]:
    """Return lines on what the model writes now, and what it costs the leader to ask it."""
    lines = [
        Text(f"it writes: {text_in(one, 'prompt')}{text_in(one, 'text')}")
        for one in sequence_in(texts, "last")
    ]
    if lines and (share := number_in(texts, "share")) is not None:
        lines[-1].append(f"  (takes {share:.1%} of the time)", style="dim")
    if texts.get("problem"):
        problem = clean_text(texts["problem"], limit=500)
        lines.append(Text(f"what the model writes: {problem}", style="yellow"))
    return lines


def refusal_lines(counters: Mapping[str, Any]) -> list[Text]:
    """Return a line on strangers who try to get in, if there are any."""
    found = {
        "connection without a certificate of this run": counters.get("connection.refused"),
        "call that its caller may not make": counters.get("caller.refused"),
    }
    told = [
        f"{number_text(num, ',')} {noun if num == 1 else noun.replace(' ', 's ', 1)}"
        for noun, num in found.items()
        if isinstance(num, int) and num > 0
    ]
    if not told:
        return []
    return [Text(f"somebody knocks; refused since this node began: {', '.join(told)}")]


def checkpoint_lines(checkpoint: Mapping[str, Any]) -> list[Text]:
    """Return lines on the last checkpoint, and in red why there is no newer one."""
    lines: list[Text] = []
    if checkpoint.get("iteration") is not None:
        lines.append(Text(f"last checkpoint: iteration {text_in(checkpoint, 'iteration')}"))
    if checkpoint.get("problem"):
        problem = clean_text(checkpoint["problem"], limit=500)
        lines.append(Text(f"CHECKPOINT FAILED: {problem}", style="red"))
    return lines


def _run_line(status: Mapping[str, Any]) -> Text:
    last = f" of {text_in(status, 'num_iterations')}" if status.get("num_iterations") else ""
    pieces = [
        Text(f"run {text_in(status, 'run_name')}", style="bold"),
        state_text(status.get("run_state")),
        Text(f"iteration {text_in(status, 'iteration')}{last}"),
        Text(f"loss {number_text(status.get('loss'), '.4f')}"),
        Text(f"{number_text(status.get('tokens_per_s'), ',.0f')} tokens/s"),
        leader_text(status),
    ]
    return Text("   ").join(pieces)


def leader_text(status: Mapping[str, Any]) -> Text:
    """Return who leads, and whether another is being elected."""
    leader = mapping_in(status, "leader")
    electing = ", another is being elected" if leader.get("electing") is True else ""
    return Text(f"leader {name_of(leader)} (term {text_in(leader, 'term')}{electing})")


def node_line(node: Mapping[str, Any]) -> Text:
    """Return a line on this node."""
    pieces = [
        Text(f"you {name_of(node)} ({text_in(node, 'id')[:8]})", style="bold"),
        state_text(node.get("state")),
        Text(text_in(node, "role")),
        Text(f"stage {text_in(node, 'stage_index')}"),
        Text(f"capacity {text_in(node, 'capacity')}"),
        Text(text_in(node, "device") + (" (free)" if node.get("device_free") is True else "")),
        _address(node),
    ]
    return Text("   ").join(pieces)


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    everybody = [node for stage in stages for node in sequence_in(stage, "nodes")]
    has_roles = any(_role(node, ()) not in _USUAL_ROLES for node in everybody)
    table.add_column("STAGE")
    table.add_column("NODE", overflow="ellipsis", max_width=32)
    if has_roles:
        table.add_column("ROLE")
    table.add_column("STATE")
    for name in ("CAPACITY", "FLOWS", "DONE"):
        table.add_column(name, justify="right")
    told = {name: of for name, of in _TOLD.items() if any(of(node) != "-" for node in everybody)}
    for name in told:
        table.add_column(name, overflow="ellipsis", max_width=_DEVICE_WIDTH_MAX)
    table.add_column("ADDRESS", overflow="fold")
    for stage in stages:
        nodes = sequence_in(stage, "nodes")
        index = text_in(stage, "index") + (" data" if stage.get("index") == 0 else "")
        if len(everybody) <= NUM_NODES_SHOWN_MAX and nodes:
            for position, node in enumerate(nodes):
                role = [_role(node, nodes)] if has_roles else []
                own = [of(node) for of in told.values()]
                table.add_row("" if position else index, *_node_cells(node, role, own))
        else:
            table.add_row(index, *_summary_cells(nodes, has_roles=has_roles))
    return table


def _role(node: Mapping[str, Any], of_stage: Sequence[Mapping[str, Any]]) -> str:
    """Return what a node is: of a server, which kind it is, unless it is its stage's only one."""
    duty = text_in(node, "duty")
    role = text_in(node, "role")
    if duty != "-":
        # The only server of a stage has both duties.
        is_only = sum(text_in(other, "duty") != "-" for other in of_stage) == 1
        return "server" if is_only else f"{duty} server"
    return "data node" if role == "data" else role


def names_of(status: Mapping[str, Any]) -> dict[str, str]:
    """Return the shown name of each member, by its id."""
    nodes = [
        node for stage in sequence_in(status, "stages") for node in sequence_in(stage, "nodes")
    ]
    return {str(node.get("id")): name_of(node) for node in nodes}


def _flow_table(flows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> RenderableType:
    """Return a table of flows, equal ones in one row, with the cost of each hop in milliseconds."""
    if not flows:
        return Text("no flows yet")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("FLOWS", "COST ms"):
        table.add_column(name, justify="right")
    table.add_column("PATH, ms of each hop", overflow="fold")
    for count, total, text in flow_rows(flows, names):
        table.add_row(str(count), number_text(1e3 * total, ",.0f"), Text(text))
    return table


def flow_rows(
    flows: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> list[tuple[int, float, str]]:
    """Return number, cost in seconds and path of flows, the cheapest first, equal ones in one."""
    rows: dict[str, tuple[float, int]] = {}
    for flow in flows:
        path = flow.get("path")
        costs = flow.get("costs_s")
        if not isinstance(path, list) or not isinstance(costs, list) or not path:
            continue
        pieces = [_called(path[0], names)]
        numbers = [cost for cost in costs if isinstance(cost, int | float)]
        for node_id, cost in zip(path[1:], numbers, strict=False):
            pieces.append(f"-{number_text(1e3 * cost, ',.0f')}> {_called(node_id, names)}")
        total = sum(numbers)
        count = rows.get(" ".join(pieces), (0.0, 0))[1]
        rows[" ".join(pieces)] = (total, count + 1)
    in_order = sorted(rows.items(), key=lambda row: row[1][0])
    return [(count, total, text) for text, (total, count) in in_order]


def _called(node_id: object, names: Mapping[str, str]) -> str:
    return names.get(str(node_id)) or clean_text(str(node_id)[:8])


def _node_cells(
    node: Mapping[str, Any], role: Sequence[str], told: Sequence[str]
) -> list[str | Text]:
    counts = [text_in(node, name) for name in ("capacity", "flows", "microbatches")]
    return [
        Text(name_of(node)),
        *role,
        state_text(node.get("state")),
        *counts,
        *map(Text, told),
        _address(node),
    ]


def _busy(node: Mapping[str, Any]) -> str:
    """Return for which share of an iteration a node computes, or sends if that is more."""
    computing_s, waiting_s, sending_s = (
        number_in(node, name) for name in ("computing_s", "waiting_s", "sending_s")
    )
    if computing_s is None or waiting_s is None or sending_s is None:
        return "-"
    if (whole_s := computing_s + waiting_s) <= 0:
        return "-"
    sends = sending_s > computing_s
    share = min(1.0, max(computing_s, sending_s) / whole_s)
    return f"{100 * share:.0f} %" + (" sending" if sends else "")


def _device(node: Mapping[str, Any]) -> str:
    """Return what a node computes on, without the details in parentheses."""
    return text_in(node, "device").split(" (")[0]


_TOLD = {"BUSY": _busy, "DEVICE": _device}
"""Columns of what members say of themselves. One of which nobody has told is left out."""


def _address(node: Mapping[str, Any]) -> Text:
    """Return a node's address; where nobody can dial it, how it is reached instead."""
    if node.get("reach") == _OUTBOUND:
        return Text(f"{text_in(node, 'address')} (outbound only)", style="yellow")
    return Text(text_in(node, "address"))


def _summary_cells(nodes: Sequence[Mapping[str, Any]], *, has_roles: bool) -> list[str | Text]:
    roles = Counter(_role(node, nodes) for node in nodes)
    counts_of = (counted(count, role) for role, count in roles.items())
    words = [", ".join(counts_of)] if has_roles else []
    if not nodes:
        return [Text("nobody", style="red"), *words, Text("empty", style="red"), "0", "0", "0"]
    counts = [clean_text(_total(nodes, name)) for name in ("capacity", "flows", "microbatches")]
    return [counted(len(nodes), "node"), *words, "", *counts]


def _total(nodes: Sequence[Mapping[str, Any]], name: str) -> int:
    return sum(value for node in nodes if isinstance(value := node.get(name), int))


def state_text(value: object) -> Text:
    """Return a state of a run or node in its colour."""
    text = clean_text("?" if value is None else value)
    return Text(text, style=_STATE_STYLES.get(text, ""))


def name_of(node: Mapping[str, Any]) -> str:
    """Return a node's name, or the beginning of its id."""
    return clean_text(node.get("name") or str(node.get("id") or "?")[:8])


def text_in(values: Mapping[str, Any], name: str) -> str:
    """Return the cleaned text of a value, or a dash if it is absent."""
    value = values.get(name)
    return "-" if value is None else clean_text(value)


def number_text(value: object, form: str) -> str:
    """Return a number in a format, or a dash if the value is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    try:
        return format(value, form)
    except OverflowError:
        # An integer too large for a float. No honest peer sends one.
        return "?"
