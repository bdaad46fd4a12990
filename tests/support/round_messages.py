"""Messages of collaborative runs: an example of each kind, and strategies for their fields."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from decod.ids import AveragingId, NodeId
from decod.protocol.core import messages as m
from decod.protocol.core.messages import rounds as r

_HEIGHT = r.Height(3, "0" * 64)


def round_messages(averaging: AveragingId, one: NodeId, other: NodeId) -> list[m.Message]:
    """Return one message of every kind about two peers."""
    entries = (r.PeerEntry(one, "h:1", level=True), r.PeerEntry(other, "h:2", level=False))
    past = ("1" * 64, "2" * 64)
    return [
        r.Greeting("h:1", _HEIGHT, past, 2, one, "h:1"),
        r.Roll(1, 2, _HEIGHT, past, entries),
        r.Standing(1, 2, _HEIGHT, averaging, 64, 10.5, averaging=True),
        r.Standing(1, 2, _HEIGHT, None, 64, 10.5, averaging=False),
        r.Progress(1, 2, _HEIGHT, 64, 10.5, 0.25, (one, other)),
        r.CloseRound(averaging),
        r.RoundClosed(averaging, 64, 5),
        r.BeginRound(averaging, _HEIGHT, (one,), (64,), (5,), 1, (other,)),
        r.RoundReady(averaging, "0" * 64),
        r.RoundReady(averaging, "", "lost", (other,)),
        r.CommitRound(averaging, "0" * 64),
        r.Farewell(),
        r.Farewell(other, "h:2"),
    ]


def of_rounds(
    node_ids: st.SearchStrategy[NodeId],
    addresses: st.SearchStrategy[str],
    hashes: st.SearchStrategy[str],
) -> dict[str, st.SearchStrategy[Any]]:
    """Return strategies for fields, by their names."""
    numbers, rates = st.integers(0, 2**31 - 1), st.floats(0, 1e12)
    heights = st.builds(r.Height, numbers, hashes)
    entries = st.builds(r.PeerEntry, node_ids, addresses, st.booleans())
    nodes = st.lists(node_ids, max_size=4, unique=True).map(tuple)
    return {
        "height": heights,
        "past": st.lists(hashes, max_size=4).map(tuple),
        "num_peers": numbers,
        "coordinator": node_ids,
        "coordinator_address": addresses,
        "peers": st.lists(entries, max_size=4, unique_by=lambda e: e.node_id).map(tuple),
        "num_samples": numbers,
        "samples_per_s": rates,
        "step_s": rates,
        "awaited": nodes,
        "roster": st.lists(node_ids, min_size=1, max_size=4, unique=True).map(tuple),
        "weights": st.just(()),
        "digests": st.just(()),
        "num_rows": st.just(1),
        "listeners": st.just(()),
        "average_hash": hashes,
        "lost": nodes,
        "successor": st.none() | node_ids,
        "successor_address": st.none() | addresses,
    }


@st.composite
def begun_rounds(draw: st.DrawFn, begun_of: st.SearchStrategy[r.BeginRound]) -> r.BeginRound:
    """Give each of the roster a weight."""
    begun = draw(begun_of)
    num = len(begun.roster)
    weights = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num))
    digests = draw(st.lists(st.integers(0, 2**63 - 1), min_size=num, max_size=num))
    rows = draw(st.integers(1, num))
    return replace(begun, weights=tuple(weights), digests=tuple(digests), num_rows=rows)
