"""The simulator hands messages over as they are: here they are encoded and decoded on the way."""

from collections import Counter
from unittest.mock import patch

from decod.ids import RunId
from decod.protocol.core.messages import Message
from decod.protocol.core.messages.scopes import Way
from decod.sim.elections import election_storm
from decod.sim.simulated_host import SimHost
from decod.sim.storm import storm_scenario, weather
from decod.wire import codec
from decod.wire.v1 import control_pb2

RUN_ID = RunId("a" * 26)

_SAID = SimHost._said
_SEEDS = range(8)


def test_whatever_nodes_say_in_storms_the_wire_carries() -> None:
    """A node that says what can't be said would crash, and its peers would drop what they can't
    read: both look like a lost host, which a storm survives."""
    carried: Counter[str] = Counter()

    def said(host: SimHost, message: Message, way: Way | None) -> object:
        received = _SAID(host, message, way)
        envelope = codec.encode(RUN_ID, host.node_id, received.term, 0, message, way)
        data = codec.parse(control_pb2.Envelope, envelope.SerializeToString())
        goal = host.node_id if way is None else way.goal
        decoded = codec.decode(data, receiver=goal)
        assert (decoded.sender, decoded.term) == (host.node_id, received.term)
        assert (decoded.message, decoded.way) == (message, way)
        carried[type(message).__name__] += 1
        return received

    with patch.object(SimHost, "_said", said):
        for seeds, drawn in ((_SEEDS, storm_scenario), (range(4), election_storm)):
            failures, _ = weather(seeds, drawn)
            assert not failures, "\n\n".join(failures)
    assert any(storm_scenario(seed).protocol.routing == "flow" for seed in _SEEDS)
    assert len(carried) > 45, carried
