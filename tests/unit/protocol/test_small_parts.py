"""Digests, reference counts, deadlines, link costs, and the protocol's numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import ConfigError
from decod.ids import FlowId, Iteration, MicrobatchId, NodeId
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.effects import FreeTensor
from decod.protocol.core.events import earliest
from decod.protocol.core.fingerprints import add_digests, digest_of
from decod.run.protocol_config import ProtocolConfig
from tests.unit.protocol.cast import mb, tensor

ids = st.builds(MicrobatchId, st.integers(1, 10**6), st.integers(0, 1000), st.integers(0, 10**6))


# --- digest ---------------------------------------------------------------------------------------


@given(st.sets(ids, max_size=20), st.data())
def test_digests_of_parts_add_up_to_that_of_the_whole(
    whole: set[MicrobatchId], data: st.DataObject
) -> None:
    part = data.draw(st.sets(st.sampled_from(sorted(whole)))) if whole else set()
    rest = whole - part
    assert add_digests([digest_of(part), digest_of(rest)]) == digest_of(sorted(whole, reverse=True))


@given(st.sets(ids, min_size=1, max_size=20), ids)
def test_a_lost_or_repeated_microbatch_changes_the_digest(
    batch: set[MicrobatchId], other: MicrobatchId
) -> None:
    digest = digest_of(batch)
    one = min(batch)
    assert digest_of(batch - {one}) != digest
    assert digest_of([*batch, one]) != digest
    if other not in batch:
        assert digest_of((batch - {one}) | {other}) != digest


def test_a_digest_fits_into_63_bits_and_never_changes() -> None:
    """It travels in a signed 64-bit field, and nodes of two releases must agree on it."""
    batch = [mb(k, iteration=10**6) for k in range(100)]
    assert 0 <= digest_of(batch) < 1 << 63
    assert 0 <= add_digests([(1 << 63) - 1] * 3) < 1 << 63
    assert digest_of([MicrobatchId(1, 0, 0)]) == 3569668903477806787
    assert digest_of([]) == 0


def test_the_fields_of_an_id_are_not_interchangeable() -> None:
    swapped = [MicrobatchId(1, 2, 3), MicrobatchId(1, 3, 2), MicrobatchId(2, 1, 3)]
    assert len({digest_of([m]) for m in swapped}) == 3


# --- tensors --------------------------------------------------------------------------------------


def test_a_tensor_is_freed_when_its_last_reference_goes() -> None:
    store = TensorStore()
    store.add(tensor(1, 100))
    store.add(tensor(2, 50))
    store.retain(tensor(1).id)
    assert store.release(tensor(1).id) == []
    assert (len(store), store.size_bytes) == (2, 150)
    freed = [FreeTensor(tensor(1).id), FreeTensor(tensor(2).id)]
    assert store.release(tensor(1).id, tensor(2).id) == freed
    assert (len(store), store.size_bytes) == (0, 0)


def test_a_tensor_that_is_handed_over_is_no_longer_counted() -> None:
    store = TensorStore()
    store.hand_over(store.add(tensor(1, 100)))
    assert (len(store), store.size_bytes) == (0, 0)


def test_misuse_of_a_tensor_is_a_bug() -> None:
    store = TensorStore()
    store.add(tensor(1))
    with pytest.raises(AssertionError):
        store.add(tensor(1))
    store.retain(tensor(1).id)
    with pytest.raises(AssertionError):
        store.hand_over(tensor(1).id)
    with pytest.raises(AssertionError):
        store.release(tensor(2).id)


# --- time -----------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(0, 1e6)))
def test_the_earliest_deadline_is_the_least_that_exists(deadlines: list[float | None]) -> None:
    assert earliest(*deadlines) == min((d for d in deadlines if d is not None), default=None)


# --- names and numbers ----------------------------------------------------------------------------


def test_ids_read_well() -> None:
    assert str(Iteration(3, 2)) == "3.2"
    assert str(MicrobatchId(3, 1, 7)) == "3/1/7"
    assert str(FlowId(NodeId("abcdefghijkl"), 4)) == "abcdefgh#4"


@pytest.mark.parametrize(
    "changes",
    [
        {"heartbeat_interval_s": 0},
        {"probe_timeout_s": -1.0},
        {"iteration_timeout_s": 86_401},
        {"leader_timeout_s": float("nan")},
        {"tree_fanout": 0},
        {"max_peers_per_stage": 1001},
        {"min_data_nodes": -1},
        {"heartbeat_interval_s": 3.0, "heartbeat_timeout_s": 5.9},
        {"heartbeat_timeout_s": float("nan")},
    ],
)
def test_numbers_that_can_not_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"protocol\."):
        ProtocolConfig(**changes)  # type: ignore[arg-type] # Bad on purpose.


def test_the_least_and_the_greatest_numbers_are_taken() -> None:
    config = ProtocolConfig(
        heartbeat_interval_s=1.0,
        heartbeat_timeout_s=2.0,
        iteration_timeout_s=86_400,
        tree_fanout=1000,
    )
    assert config.tree_fanout == 1000
