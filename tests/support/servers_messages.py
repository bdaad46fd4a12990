"""Messages of servers and workers, and values of their fields, for tests of the wire."""

from typing import Any

from hypothesis import strategies as st

from decod.ids import AveragingId, Iteration, MicrobatchId, NodeId
from decod.protocol.core import messages as m
from decod.protocol.core.messages.servers import (
    Fetch,
    Folded,
    Given,
    Holding,
    Leg,
    Missing,
    Offer,
    Revoke,
    Settled,
    Taken,
    Unable,
)
from decod.protocol.core.view import Duty


def servers_messages(iteration: Iteration, worker: NodeId) -> list[m.Message]:
    """Return one message of every kind without a tensor."""
    first, second, third = (MicrobatchId(1, 0, index) for index in range(3))
    one, averaging = (iteration, 1, first), AveragingId(iteration, 1)
    return [
        Offer(iteration, 1, 4, 0.5),
        Given(*one, worker),
        Taken(*one, worker),
        Fetch(*one),
        Folded(*one),
        Revoke(*one, 2),
        Unable(*one, "no", 2),
        Missing(*one),
        Holding(averaging, (first,), (second,), (third,)),
        Settled(averaging, 3, 77),
    ]


def of_servers(
    node_ids: st.SearchStrategy[Any],
    counts: st.SearchStrategy[int],
    durations: st.SearchStrategy[float],
) -> dict[str, Any]:
    """Return what fields may hold, by their names."""
    return {
        "duty": st.sampled_from(Duty),
        "leg": st.sampled_from(Leg),
        "worker": node_ids,
        "attempt": counts,
        "window": counts,
        "pass_s": durations,
        "idle": st.booleans(),
    }


def holdings(
    averagings: st.SearchStrategy[Any], microbatches: st.SearchStrategy[Any]
) -> st.SearchStrategy[Holding]:
    """Return what a worker has of a lost server's microbatches, each in one list."""
    bounds = st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted)
    lists = st.lists(microbatches, max_size=9, unique=True)
    return st.builds(
        lambda averaging, held, at: Holding(
            averaging, tuple(held[: at[0]]), tuple(held[at[0] : at[1]]), tuple(held[at[1] :])
        ),
        averagings,
        lists,
        bounds,
    )
