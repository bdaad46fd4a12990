"""Carriers of what peers of a collaborative run say: a part of `codec`'s table."""

from collections.abc import Mapping

from decod.protocol.core.messages import rounds as r
from decod.wire import fields as f
from decod.wire import validate
from decod.wire.averaging_codec import AVERAGING

_HASH = f.Plain(validate.sha256)
_HEIGHT = f.Struct(r.Height, {"round": f.ITERATION, "state_id": _HASH})
_PAST = f.Scalars(validate.sha256, r.PAST_MAX)
_PEERS = f.Scalars(validate.node_id, r.PEERS_MAX, unique=True)
_ENTRY = f.Struct(r.PeerEntry, {"node_id": f.NODE_ID, "address": f.ADDRESS, "level": f.BOOLEAN})


def _verify_roll(message: r.Roll) -> None:
    validate.unique("peers", [entry.node_id for entry in message.peers])


def _verify_begin(message: r.BeginRound) -> None:
    num = len(message.roster)
    validate.length("weights", len(message.weights), low=num, high=num)
    validate.length("digests", len(message.digests), low=num, high=num)
    if not 1 <= message.num_rows <= num:
        raise validate.malformed("num_rows", message.num_rows, allowed=f"from 1 to {num}")
    both = {*message.roster} & {*message.listeners}
    if both:
        raise validate.malformed("listeners", sorted(both), allowed="who is not in the roster")


BODIES: Mapping[str, f.Struct] = {
    "greeting": f.Struct(
        r.Greeting,
        {
            "address": f.ADDRESS,
            "height": _HEIGHT,
            "past": _PAST,
            "num_peers": f.COUNT,
            "coordinator": f.NODE_ID,
            "coordinator_address": f.ADDRESS,
        },
    ),
    "roll": f.Struct(
        r.Roll,
        {
            "term": f.ITERATION,
            "version": f.NUMBER,
            "height": _HEIGHT,
            "past": _PAST,
            "peers": f.Repeated(_ENTRY, r.PEERS_MAX),
        },
        _verify_roll,
    ),
    "standing": f.Struct(
        r.Standing,
        {
            "term": f.ITERATION,
            "version": f.NUMBER,
            "height": _HEIGHT,
            "committed": f.Optional(AVERAGING),
            "num_samples": f.NUMBER,
            "samples_per_s": f.MAGNITUDE,
            "averaging": f.BOOLEAN,
        },
    ),
    "progress": f.Struct(
        r.Progress,
        {
            "term": f.ITERATION,
            "version": f.NUMBER,
            "height": _HEIGHT,
            "num_samples": f.NUMBER,
            "samples_per_s": f.MAGNITUDE,
            "step_s": f.DURATION,
            "awaited": _PEERS,
        },
    ),
    "close_round": f.Struct(r.CloseRound, {"averaging": AVERAGING}),
    "round_closed": f.Struct(
        r.RoundClosed, {"averaging": AVERAGING, "num_samples": f.COUNT, "digest": f.NUMBER}
    ),
    "begin_round": f.Struct(
        r.BeginRound,
        {
            "averaging": AVERAGING,
            "height": _HEIGHT,
            "roster": f.Scalars(validate.node_id, r.PEERS_MAX, num_min=1, unique=True),
            "weights": f.Scalars(validate.count, r.PEERS_MAX),
            "digests": f.Scalars(validate.number, r.PEERS_MAX),
            "num_rows": f.COUNT,
            "listeners": _PEERS,
        },
        _verify_begin,
    ),
    "round_ready": f.Struct(
        r.RoundReady,
        {
            "averaging": AVERAGING,
            "average_hash": f.Plain(validate.known_sha256),
            "failure": f.REASON,
            "lost": _PEERS,
        },
    ),
    "commit_round": f.Struct(r.CommitRound, {"averaging": AVERAGING, "average_hash": _HASH}),
    "farewell": f.Struct(
        r.Farewell,
        {
            "successor": f.Optional(f.NODE_ID),
            "successor_address": f.Optional(f.ADDRESS),
        },
    ),
}
