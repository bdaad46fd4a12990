"""Messages of collaborative runs: an example of each kind."""

from decod.ids import AveragingId, NodeId
from decod.protocol.core import messages as m
from decod.protocol.core.messages import round_messages as r

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
