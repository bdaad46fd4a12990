"""How a node spends an iteration, in shares of its length, from the node's own rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decod.analysis.records import RoundRow
from decod.analysis.selection import Selection
from decod.obs.text import clean_text
from decod.obs.told import mapping_in, sequence_in
from decod.why.explanation import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the time of some iterations. `compute`, `data` and the three waits add up to 1."""

    first: int
    """Number of the first of these iterations."""
    last: int
    round_s: float
    """Mean length."""
    longest_s: float
    """Length of the longest one."""
    total_s: float
    """All together."""
    steps: float
    """Mean number of microbatches that passed this node's stage here."""
    compute: float
    data: float
    """Reading data."""
    wait_start: float
    """Waiting until the first microbatch begins here."""
    wait_passes: float
    """Waiting for tensors of other stages between passes."""
    wait_average: float
    """Waiting for the members of the stage in the average, and for the commit."""
    transfer: float
    """While tensors are on their way from here. It runs beside the others."""

    @property
    def wait(self) -> float:
        return self.wait_start + self.wait_passes + self.wait_average

    def figures(self) -> tuple[Figure, ...]:
        """Return the shares as figures of an answer."""
        what = f"in iterations {self.first} to {self.last}, of {self.round_s:.3g} s each"
        waits = (
            ("wait_start_share", self.wait_start, "until the first microbatch begins here"),
            ("wait_passes_share", self.wait_passes, "for tensors of other stages, between passes"),
            ("wait_average_share", self.wait_average, "for others in the average and the commit"),
        )
        long = self.longest_s / self.total_s
        is_long = long >= _LONG_MIN and self.total_s >= _LONG_ITERATIONS_MIN * self.round_s
        return (
            Figure(
                name="compute_share",
                value=round(self.compute, 4),
                text=f"{percent(self.compute)} computing, {what}",
            ),
            *(
                (_share("data_share", self.data, "reading data"),)
                if self.data >= _SHOWN_MIN
                else ()
            ),
            _share("wait_share", self.wait, "waiting:"),
            *(
                _share(name, share, f"waiting {text}", indent=True)
                for name, share, text in waits
                if share >= _SHOWN_MIN
            ),
            _share(
                "transfer_share",
                self.transfer,
                "sending tensors to other nodes, beside computing and waiting",
            ),
            Figure(
                name="num_microbatches",
                value=round(self.steps, 2),
                text=f"{self.steps:.3g} microbatches an iteration at this node",
            ),
            *((_longest(self.longest_s, long),) if is_long else ()),
        )


_SHOWN_MIN = 0.005
_LONG_MIN = 0.25
"""An iteration that takes this share of the time of all is told, if there are enough."""
_LONG_ITERATIONS_MIN = 10


def _longest(seconds: float, share: float) -> Figure:
    text = f"one iteration alone took {seconds:.3g} s, {percent(share)} of all this time"
    return Figure(name="longest_s", value=round(seconds, 4), text=text)


def _share(name: str, share: float, text: str, *, indent: bool = False) -> Figure:
    return Figure(
        name=name,
        value=round(share, 4),
        text=f"{'  ' if indent else ''}{percent(share)} {text}",
    )


def percent(share: float) -> str:
    """Return a share as text, like 42 %."""
    return f"{100 * share:.0f} %"


def shares_of(rounds: Selection | None) -> TimeShares | None:
    """Return how a node has spent its newest iterations; None if it has recorded none."""
    if rounds is None or not rounds.rows:
        return None
    rows = rounds.rows
    total_s = max(sum(row.round_s for row in rows), 1e-9)
    compute_s = data_s = start_s = average_s = sending_s = 0.0
    for row in rows:
        # What overlaps the round before must not make a share larger than the round.
        left_s = row.round_s
        busy_s = min(_compute_s(row), left_s)
        read_s = min(row.data_s or 0.0, left_s - busy_s)
        left_s -= busy_s + read_s
        began_s = min(row.matchmaking_s or 0.0, left_s)
        left_s -= began_s
        averaged_s = (row.averaging_s or 0.0) - (row.averaging_compute_s or 0.0)
        waited_s = min(max(0.0, averaged_s - (row.optimizer_s or 0.0)), left_s)
        compute_s, data_s = compute_s + busy_s, data_s + read_s
        start_s, average_s = start_s + began_s, average_s + waited_s
        sent_s = (row.sending_s or 0.0) + (row.average_sending_s or 0.0)
        sending_s += min(sent_s, row.round_s)
    return TimeShares(
        first=min(row.round for row in rows),
        last=max(row.round for row in rows),
        round_s=total_s / len(rows),
        longest_s=max(row.round_s for row in rows),
        total_s=total_s,
        steps=sum(row.steps or 0 for row in rows) / len(rows),
        compute=compute_s / total_s,
        data=data_s / total_s,
        wait_start=start_s / total_s,
        wait_average=average_s / total_s,
        wait_passes=max(0.0, total_s - compute_s - data_s - start_s - average_s) / total_s,
        transfer=sending_s / total_s,
    )


def _compute_s(row: RoundRow) -> float:
    passes_s = (row.forward_s or 0.0) + (row.backward_s or 0.0)
    return (
        passes_s
        + (row.averaging_compute_s or 0.0)
        + (row.optimizer_s or 0.0)
        + (row.other_s or 0.0)
    )


# --- what to do about waiting -------------------------------------------------------------------

SENDING_SHARE = 0.7
"""A node that sends for this share of the time is held up by its sends."""
COLLECT = (
    "collect the folder `metrics` of all nodes and run `decod analyse` on them: it says which"
    " node or link this node waits for"
)
SEND_LESS = (
    'set activations.compression = "int8" in the run file, or give this node a faster uplink'
)
SENDER_LESS = (
    'set activations.compression = "int8" in the run file, or ask the owner of that node for a'
    " faster uplink"
)
SHORT_WORK = (
    "add microbatches (batch.num_microbatches) and capacity, so that more of them are on their way"
    " at a time"
)
FASTER_DATA = "put the prepared data on a faster disk, or add a data node (batch.num_data_nodes)"


# --- who waits for whom -------------------------------------------------------------------------


def costliest_hop(status: Mapping[str, Any] | None) -> Figure | None:
    """Return the costliest hop of the flows through this node; None if none is known.

    The costs are those by which flows are chosen. A relay knows only the hops to and from itself.
    """
    if status is None:
        return None
    own, names = mapping_in(status, "node").get("id"), _names(status)
    hops: dict[tuple[str, str], float] = {}
    for flow in sequence_in(status, "flows"):
        path, costs = flow.get("path"), flow.get("costs_s")
        if not (isinstance(path, list) and isinstance(costs, list) and own in path):
            continue
        if not all(isinstance(cost, int | float) for cost in costs):
            continue
        for begin, end, cost in zip(path, path[1:], costs, strict=False):
            hops[str(begin), str(end)] = cost
    if not hops:
        return None
    (begin, end), cost_s = max(hops.items(), key=lambda item: item[1])
    return Figure(
        name="costliest_hop_s",
        value=round(cost_s, 6),
        text=f"the costliest hop of this node's flows is from {_name(begin, own, names)} to"
        f" {_name(end, own, names)}: {cost_s:.3g} s for a microbatch, with computing at its ends",
    )


def _name(node: str, own: object, names: Mapping[str, str]) -> str:
    return "this node" if node == own else names.get(node, clean_text(node, limit=8))


def _names(status: Mapping[str, Any]) -> dict[str, str]:
    nodes = [
        node for stage in sequence_in(status, "stages") for node in sequence_in(stage, "nodes")
    ]
    return {str(node.get("id")): clean_text(node.get("name"), limit=40) for node in nodes}
