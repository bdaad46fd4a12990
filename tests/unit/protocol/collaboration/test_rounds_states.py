"""What a peer knows of states: its own, the run's, and those that are on their way."""

from decod.ids import TensorId
from decod.protocol.collaboration.loading import LaterAverage, Loading, Past
from decod.protocol.collaboration.loop import DeliverAverage, PeerEffect, PeerSink
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.events import Tensor
from decod.protocol.core.messages.round_messages import PAST_MAX, Height
from tests.unit.protocol.collaboration.rounds_cast import CONFIG, START, B, events_of, height

# --- heights --------------------------------------------------------------------------------------


def test_a_past_is_bounded_and_begins_anew_with_another_state() -> None:
    past = Past(START)
    for number in range(1, PAST_MAX + 10):
        past.advance(height(number), 1)
    assert len(past.ids) == PAST_MAX
    past.restart(height(7, "y"))
    assert (past.ids, past.height) == ((), height(7, "y"))


# --- loading --------------------------------------------------------------------------------------


class Store:
    """Averages that have come."""

    def __init__(self) -> None:
        self.out = PeerSink()
        self.tensors = TensorStore(self.out)
        self.loading = Loading(CONFIG, self.tensors, self.out)

    def begin(self, at: Height) -> list[PeerEffect]:
        self.loading.begin(at, [B], averaging=False)
        return self.out.taken()

    def keep(self, before: Height, after_it: Height) -> list[PeerEffect]:
        number = TensorId(after_it.round)
        self.tensors.add(Tensor(number, 8))
        average = DeliverAverage(after_it.round, number, 0, 32, 2)
        self.loading.keep(LaterAverage(before, after_it, average))
        return self.out.taken()


def test_a_state_that_takes_too_many_rounds_to_load_is_reported_once_each_time() -> None:
    store = Store()
    for start in (0, 40):
        store.begin(height(start))
        effects = [
            effect
            for number in range(start, start + CONFIG.backlog_max + 4)
            for effect in store.keep(height(number), height(number + 1))
        ]
        assert events_of(effects) == ["peer.outrun"]
        assert store.loading.loaded(height(start)) == []


def test_a_failure_is_followed_by_a_pause_and_keeps_what_came() -> None:
    store = Store()
    store.begin(height(3))
    store.keep(height(2), height(3))
    store.keep(height(4), height(5))
    store.loading.failed(5.0, height(3), "gone")
    assert events_of(store.out.taken()) == ["peer.unloaded"]
    assert store.loading.next_s == 5.0 + CONFIG.load_pause_s
    assert store.begin(height(4)) == []
    assert [each.after for each in store.loading.leading_on(height(2))] == [height(3)]
    store.loading.look(5.0 + CONFIG.load_pause_s)
    assert store.begin(height(4))
    assert [later.average.round for later in store.loading.loaded(height(4))] == [5]
