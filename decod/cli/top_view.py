"""The picture that `decod top` draws: as many lines as the terminal has, each within its width.

Names, messages and addresses come from peers. They are cleaned, and never interpreted as markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from decod.cli.status_view import (
    checkpoint_lines,
    evaluation_lines,
    flow_rows,
    leader_text,
    message_lines,
    name_of,
    names_of,
    node_line,
    number_text,
    pausing_lines,
    recent_line,
    state_text,
    syncing_line,
    text_in,
)
from decod.cli.top_state import (
    NUM_STEPS_SHOWN,
    Curves,
    TopState,
    Wish,
    is_paused,
    left_s,
    sparkline,
)
from decod.journal.told_status import mapping_in, number_in, sequence_in, slow_texts
from decod.texts import clean_text, length_of

_TABLE_ROWS_MIN = 3
"""Rows of the member table, with its header, for which other parts make room."""

_FLOW_ROWS_MAX = 6

_HELP = (
    "decod top shows the run that this host takes part in, and looks again every second.",
    "",
    "up, down, k, j     scroll the members by one",
    "PgUp, PgDn         scroll by a page",
    "Home, End          go to the first member, or the last",
    "s                  sort by the next column",
    "p                  pause this node, or let it work again; asks first",
    "q, Ctrl-C          quit; the node goes on",
    "",
    "LINK is the slowest measured link of a member: latency, and megabits a second.",
    f"The bars show the newest {NUM_STEPS_SHOWN} iterations, from their lowest to their highest.",
    "Press any key to go back.",
)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a terminal, in characters."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to draw."""

    status: Mapping[str, Any]
    curves: Curves
    problem: str = ""
    """Why the status is old; empty if it is not."""


def render_top(scene: Scene, state: TopState, size: Size) -> RenderableType:
    """Return a picture of exactly the terminal's height. Keeps the table's scrolling in bounds."""
    if state.shows_help:
        lines = [Text(line) for line in _HELP]
        return _page(lines, [], size)
    status = scene.status
    top = [_title(status), *_curve_lines(scene, size)]
    top += [node_line(mapping_in(status, "node")), *_word_lines(status)]
    rows = _member_rows(status, state.sort)
    bottom = _bottom_lines(scene, size, len(top), len(rows))
    footer = _footer(scene, state)
    num_lines = max(0, size.height - 1)
    # A small terminal shows the run, the members, and what is the matter, before anything else.
    num_top = min(len(top), num_lines, max(1, num_lines - len(bottom) - _TABLE_ROWS_MIN))
    num_table = max(0, num_lines - num_top - len(bottom))
    num_visible = max(0, num_table - 1)
    state.fit(len(rows), num_visible)
    shown = rows[state.scroll : state.scroll + num_visible]
    table = _member_table(shown, state.sort, size.width)
    num_blank = num_table - len(shown) - 1
    blank = [Text() for _ in range(num_blank)]
    middle: list[RenderableType] = [table] if num_table else []
    parts = [*_cut(top[:num_top], size), *middle, *_cut([*blank, *bottom], size)]
    return Group(*parts, *_cut([_place(footer, state, rows, num_visible)], size))


def _page(lines: list[Text], bottom: list[Text], size: Size) -> RenderableType:
    shown = lines[: size.height]
    blank = [Text() for _ in range(size.height - len(shown) - len(bottom))]
    return Group(*_cut([*shown, *blank, *bottom], size))


def _cut(lines: Iterable[Text], size: Size) -> list[Text]:
    """Return lines that take one line of the terminal each."""
    found = []
    for line in lines:
        line.truncate(size.width, overflow="ellipsis")
        line.no_wrap = True
        found.append(line)
    return found


def _title(status: Mapping[str, Any]) -> Text:
    pieces = [
        Text(f"run {text_in(status, 'run_name')}", style="bold"),
        state_text(status.get("run_state")),
        leader_text(status),
    ]
    return Text("   ").join(pieces)


def _curve_lines(scene: Scene, size: Size) -> list[Text]:
    """Return lines on iteration, loss and rate, with what became of them lately."""
    status, steps = scene.status, scene.curves.steps[-NUM_STEPS_SHOWN:]
    last = number_in(status, "num_iterations")
    iteration = number_text(status.get("iteration"), ",")
    line = f"iteration {iteration}" if last is None else f"iteration {iteration} of {last:,}"
    if (duration_s := left_s(status, scene.curves)) is not None:
        line += f"   about {length_of(duration_s)} left"
    elif (pace_s := scene.curves.pace_s) is not None:
        line += f"   one every {pace_s:,.1f} s"
    loss = f"loss {number_text(status.get('loss'), '.4f')}"
    rate = f"tokens/s {number_text(status.get('tokens_per_s'), ',.0f')}"
    width = max(len(loss), len(rate))
    room = size.width - width - 2
    return [
        Text(line),
        Text(f"{loss:{width}}  ") + Text(sparkline([s.loss for s in steps], room), style="cyan"),
        Text(f"{rate:{width}}  ") + Text(sparkline([s.rate for s in steps], room), style="green"),
    ]


def _word_lines(status: Mapping[str, Any]) -> list[Text]:
    """Return lines on what is going on, the most urgent first."""
    lines = message_lines(status) + pausing_lines(mapping_in(status, "pausing"))
    lines += [Text(text, style="yellow") for text in slow_texts(status)]
    if syncing := mapping_in(status, "syncing"):
        lines.append(syncing_line(syncing))
    lines += checkpoint_lines(mapping_in(status, "checkpoint"))
    return lines + evaluation_lines(mapping_in(status, "evaluation"))


# --- members --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MemberRow:
    """One member, or a stage that has none."""

    stage: int
    node: Mapping[str, Any]
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None

    def key(self, sort: str) -> tuple[Any, ...]:
        """Return what the row is sorted by: words upwards, amounts downwards."""
        name = name_of(self.node)
        if sort == "node":
            return (name, self.stage)
        if sort == "state":
            return (str(self.node.get("state") or "?"), self.stage, name)
        if sort == "link":
            # The slowest first: that is the one to look at.
            unknown = self.bandwidth_bytes_per_s is None
            return (unknown, self.bandwidth_bytes_per_s or 0.0, self.stage, name)
        if sort == "stage":
            return (self.stage, name)
        amount = number_in(self.node, {"done": "microbatches"}.get(sort, sort))
        return (amount is None, -(amount or 0), self.stage, name)


def _member_rows(status: Mapping[str, Any], sort: str) -> list[_MemberRow]:
    slowest = _slowest_links(sequence_in(status, "links"))
    rows = []
    for position, stage in enumerate(sequence_in(status, "stages")):
        index = stage.get("index")
        stage_index = index if isinstance(index, int) else position
        nodes = sequence_in(stage, "nodes")
        for node in nodes:
            latency_s, bandwidth = slowest.get(str(node.get("id")), (None, None))
            rows.append(_MemberRow(stage_index, node, latency_s, bandwidth))
        if not nodes:
            rows.append(_MemberRow(stage_index, {"name": "nobody", "state": "empty"}))
    return sorted(rows, key=lambda row: row.key(sort))


def _slowest_links(
    links: Sequence[Mapping[str, Any]],
) -> dict[str, tuple[float | None, float | None]]:
    """Return latency and bandwidth of each node's slowest measured link."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for link in links:
        bandwidth = number_in(link, "bandwidth_bytes_per_s")
        if bandwidth is None:
            continue
        for end in (str(link.get("from")), str(link.get("to"))):
            known = found.get(end, (None, None))[1]
            if known is None or bandwidth < known:
                found[end] = (number_in(link, "latency_s"), bandwidth)
    return found


_TITLES = {
    "stage": "STAGE",
    "node": "NODE",
    "role": "ROLE",
    "state": "STATE",
    "capacity": "CAP",
    "flows": "FLOWS",
    "done": "DONE",
    "link": "LINK",
    "address": "ADDRESS",
}


def _columns(width: int) -> list[str]:
    """Return the columns of the member table that fit."""
    if width < 60:
        return ["stage", "node", "state", "done"]
    columns = ["stage", "node", "state", "capacity", "flows", "done", "link"]
    return columns if width < 110 else [*columns[:2], "role", *columns[2:], "address"]


def _member_table(rows: Sequence[_MemberRow], sort: str, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", width=width)
    columns = _columns(width)
    for name in columns:
        title = _TITLES[name] + ("*" if name == sort else "")
        right = name in ("capacity", "flows", "done", "link")
        table.add_column(
            title,
            justify="right" if right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if name == "node" else None,
        )
    for row in rows:
        table.add_row(*(_cell(row, name) for name in columns))
    return table


def _cell(row: _MemberRow, column: str) -> Text:
    node = row.node
    match column:
        case "stage":
            return Text(f"{row.stage} data" if row.stage == 0 else str(row.stage))
        case "node":
            return Text(name_of(node))
        case "role":
            return Text(text_in(node, "duty" if node.get("duty") else "role"))
        case "state":
            text = state_text(node.get("state"))
            return Text(text.plain, style="red") if text.plain == "empty" else text
        case "link":
            return Text(_link_text(row))
        case "done":
            return Text(number_text(node.get("microbatches"), ","))
        case _:
            return Text(text_in(node, column))


def _link_text(row: _MemberRow) -> str:
    if row.bandwidth_bytes_per_s is None:
        return "-"
    mbit = number_text(8e-6 * row.bandwidth_bytes_per_s, ",.0f")
    if row.latency_s is None:
        return f"{mbit} Mbit/s"
    return f"{number_text(1e3 * row.latency_s, ',.0f')} ms {mbit} Mbit/s"


# --- below the members ----------------------------------------------------------------------------


def _bottom_lines(scene: Scene, size: Size, num_top: int, num_rows: int) -> list[Text]:
    """Return recent events and flows, as many as leave room for the members."""
    status = scene.status
    room = size.height - 1 - num_top - 1 - max(_TABLE_ROWS_MIN, min(num_rows, size.height // 3))
    events = [recent_line(one) for one in sequence_in(status, "recent")[-5:]]
    events = events[-max(0, room) :] if room > 0 else []
    flows = _flow_lines(status)[: _FLOW_ROWS_MAX + 1]
    # The blank line, the title and a flow.
    num_flows = room - len(events) - 1
    return ([Text(), *flows[:num_flows]] if flows and num_flows >= 2 else []) + events


def _flow_lines(status: Mapping[str, Any]) -> list[Text]:
    rows = flow_rows(sequence_in(status, "flows"), names_of(status))
    if not rows:
        return []
    lines = [Text("FLOWS  COST ms  PATH, ms of each hop", style="bold")]
    return lines + [
        Text(f"{count:5}  {number_text(1e3 * total, ',.0f'):>7}  {path}")
        for count, total, path in rows
    ]


def _footer(scene: Scene, state: TopState) -> Text:
    if state.asks is Wish.PAUSE:
        return Text("pause this node, until `decod resume` or p? y/n", style="bold yellow")
    if state.asks is Wish.RESUME:
        return Text("let this node take microbatches again? y/n", style="bold yellow")
    if scene.problem:
        text = f"the node does not answer, this picture is old: {scene.problem}"
        return Text(clean_text(text, limit=500), style="bold red")
    if state.notice:
        return Text(clean_text(state.notice, limit=500), style="yellow")
    verb = "resume" if is_paused(scene.status) else "pause"
    return Text(f"q quit   s sort   p {verb}   ? help", style="dim")


def _place(footer: Text, state: TopState, rows: Sequence[object], num_visible: int) -> Text:
    """Add to the last line which members are shown, unless all are."""
    if 0 < num_visible < len(rows):
        first = state.scroll + 1
        last = min(len(rows), state.scroll + num_visible)
        return Text(f"{first}-{last} of {len(rows)} members   ", style="bold") + footer
    return footer
