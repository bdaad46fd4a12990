"""Digests, reference counts, deadlines, link costs, and the protocol's numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import ConfigError
from decod.ids import MicrobatchId
from decod.protocol.core.compute_queue import TensorStore
from decod.protocol.core.effects import Effect, EffectSink, FreeTensor
from decod.protocol.core.events import earliest
from decod.protocol.core.fingerprints import add_digests, digest_of
from decod.run.protocol_config import ProtocolConfig
from tests.unit.protocol.cast import tensor

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


# --- tensors --------------------------------------------------------------------------------------


def test_a_tensor_is_freed_when_its_last_reference_goes() -> None:
    out = EffectSink[Effect]()
    store = TensorStore(out)
    store.add(tensor(1, 100))
    store.add(tensor(2, 50))
    store.retain(tensor(1).id)
    store.release(tensor(1).id)
    assert out.taken() == []
    assert (len(store), store.size_bytes) == (2, 150)
    store.release(tensor(1).id, tensor(2).id)
    assert out.taken() == [FreeTensor(tensor(1).id), FreeTensor(tensor(2).id)]
    assert (len(store), store.size_bytes) == (0, 0)


# --- time -----------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(0, 1e6)))
def test_the_earliest_deadline_is_the_least_that_exists(deadlines: list[float | None]) -> None:
    assert earliest(*deadlines) == min((d for d in deadlines if d is not None), default=None)


# --- names and numbers ----------------------------------------------------------------------------


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
