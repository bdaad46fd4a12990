"""Digests, reference counts, deadlines, link costs, and the protocol's numbers."""

from hypothesis import given
from hypothesis import strategies as st

from decod.ids import MicrobatchId
from decod.protocol.core.events import earliest
from decod.protocol.core.fingerprints import add_digests, digest_of

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


# --- time -----------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.floats(0, 1e6)))
def test_the_earliest_deadline_is_the_least_that_exists(deadlines: list[float | None]) -> None:
    assert earliest(*deadlines) == min((d for d in deadlines if d is not None), default=None)
