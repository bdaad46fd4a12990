"""What a peer knows of states: its own, the run's, and those that are on their way."""

from decod.ids import TensorId
from decod.protocol.collaboration.company import Following
from decod.protocol.collaboration.loading import LaterAverage, Loading, Past, after
from decod.protocol.collaboration.loop import DeliverAverage, LoadState
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.effects import FreeTensor
from decod.protocol.core.events import Tensor
from decod.protocol.core.messages.round_messages import PAST_MAX, Height
from tests.unit.protocol.collaboration.rounds_cast import (
    CONFIG,
    START,
    A,
    B,
    C,
    D,
    entry,
    events_of,
    height,
    roll,
    standing,
)

# --- heights --------------------------------------------------------------------------------------


def test_the_same_averages_lead_to_the_same_state_and_others_to_another() -> None:
    assert after(START, "one") == after(START, "one")
    assert after(START, "one") != after(START, "two")
    assert after(after(START, "one"), "two") != after(after(START, "two"), "one")
    assert after(START, "one").round == 1


def test_a_past_knows_what_it_came_from() -> None:
    past = Past(START)
    past.advance(height(1), 32)
    past.advance(height(2), 40)
    assert past.ids == (height(1).state_id, START.state_id)
    assert past.came_from(START)
    assert past.came_from(height(1))
    assert not past.came_from(height(2)), "that is the present one"
    assert not past.came_from(height(1, "y"))


def test_samples_since_a_state_that_others_have_had_too_are_lost() -> None:
    past = Past(START)
    past.advance(height(1), 32)
    past.advance(height(2), 40)
    past.advance(height(3), 50)
    assert past.num_since([height(1).state_id]) == 90
    assert past.num_since([height(3).state_id, height(1).state_id]) == 0
    assert past.num_since(["unknown"]) == 122


def test_a_past_is_bounded_and_begins_anew_with_another_state() -> None:
    past = Past(START)
    for number in range(1, PAST_MAX + 10):
        past.advance(height(number), 1)
    assert len(past.ids) == PAST_MAX
    past.restart(height(7, "y"))
    assert (past.ids, past.height) == ((), height(7, "y"))


# --- following ------------------------------------------------------------------------------------


def test_when_the_batch_is_full_is_predicted_from_the_last_word() -> None:
    following = Following(A, roll(A, B), 0.0, START)
    assert following.closing_in_s(0.0, 100) is None, "there is no word yet"
    following.said(10.0, standing(20, rate=8.0))
    assert following.closing_in_s(10.0, 100) == 10.0
    assert following.closing_in_s(15.0, 100) == 5.0
    assert following.closing_in_s(30.0, 100) == 0.0


def test_nothing_is_predicted_while_an_average_is_under_way_or_nobody_works() -> None:
    following = Following(A, roll(A, B), 0.0, START)
    following.said(0.0, standing(20, averaging=True))
    assert following.closing_in_s(0.0, 100) is None
    following.said(0.0, standing(20, rate=0.0))
    assert following.closing_in_s(0.0, 100) is None


def test_the_oldest_peer_with_the_state_succeeds() -> None:
    following = Following(A, roll(A, entry(B, level=False), C, D), 0.0, START)
    assert following.successor() == C
    following.lost.add(C)
    assert following.successor() == D
    following.lost.add(D)
    assert following.successor() is None, "B has not loaded it"
    following.lost.add(B)
    assert following.successor() is None


def test_a_coordinator_that_is_heard_was_not_lost() -> None:
    following = Following(A, roll(A, B, C), 0.0, START)
    following.lost.add(A)
    following.said(3.0, standing())
    assert (following.lost, following.heard_s) == (set(), 3.0)


# --- loading --------------------------------------------------------------------------------------


class Store:
    """Averages that have come."""

    def __init__(self) -> None:
        self.tensors = TensorStore()
        self.loading = Loading(CONFIG, self.tensors)

    def keep(self, before: Height, after_it: Height) -> list[object]:
        number = TensorId(after_it.round)
        self.tensors.add(Tensor(number, 8))
        average = DeliverAverage(after_it.round, number, 0, 32, 2)
        return [*self.loading.keep(LaterAverage(before, after_it, average))]


def test_a_state_is_asked_for_once() -> None:
    loading = Store().loading
    assert loading.begin(height(3), [B, C], averaging=False) == [LoadState((B, C), height(3))]
    assert loading.under_way
    assert loading.begin(height(4), [B, C], averaging=False) == []


def test_nobody_who_would_miss_an_average_under_way_asks() -> None:
    store = Store()
    assert store.loading.begin(height(3), [B], averaging=True) == []
    store.keep(height(3), height(4))
    assert store.loading.begin(height(4), [B], averaging=True), "the next ones come here, too"


def test_without_donors_nobody_asks() -> None:
    assert Store().loading.begin(height(3), [], averaging=False) == []


def test_averages_that_came_meanwhile_lead_on_from_the_state() -> None:
    store = Store()
    store.loading.begin(height(3), [B], averaging=False)
    for number in range(2, 7):
        store.keep(height(number), height(number + 1))
    found, effects = store.loading.loaded(height(3))
    assert [later.average.round for later in found] == [4, 5, 6, 7]
    assert effects == [FreeTensor(TensorId(3))], "that one is in the state"
    assert not store.loading.under_way


def test_what_comes_after_a_gap_is_of_no_use() -> None:
    store = Store()
    store.loading.begin(height(3), [B], averaging=False)
    store.keep(height(3), height(4))
    store.keep(height(5), height(6))
    found, effects = store.loading.loaded(height(3))
    assert [later.average.round for later in found] == [4]
    assert effects == [FreeTensor(TensorId(6))]
    assert len(store.tensors) == 1, "only the one that the loop gets"


def test_few_averages_are_kept() -> None:
    store = Store()
    freed = [
        effect
        for number in range(CONFIG.backlog_max + 3)
        for effect in store.keep(height(number), height(number + 1))
    ]
    assert freed == [FreeTensor(TensorId(number)) for number in (1, 2, 3)]


def test_a_state_that_takes_too_many_rounds_to_load_is_reported_once_each_time() -> None:
    store = Store()
    for start in (0, 40):
        store.loading.begin(height(start), [B], averaging=False)
        effects = [
            effect
            for number in range(start, start + CONFIG.backlog_max + 4)
            for effect in store.keep(height(number), height(number + 1))
        ]
        assert events_of(effects) == ["peer.outrun"]
        assert store.loading.loaded(height(start))[0] == []


def test_a_failure_is_followed_by_a_pause_and_keeps_what_came() -> None:
    store = Store()
    store.loading.begin(height(3), [B], averaging=False)
    store.keep(height(2), height(3))
    store.keep(height(4), height(5))
    assert events_of(store.loading.failed(5.0, height(3), "gone")) == ["peer.unloaded"]
    assert store.loading.next_s == 5.0 + CONFIG.load_pause_s
    assert store.loading.begin(height(4), [B], averaging=False) == []
    assert [each.after for each in store.loading.leading_on(height(2))] == [height(3)]
    store.loading.look(5.0 + CONFIG.load_pause_s)
    assert store.loading.begin(height(4), [B], averaging=False)
    found, _ = store.loading.loaded(height(4))
    assert [later.average.round for later in found] == [5]
