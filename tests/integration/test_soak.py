"""Hosts are killed, frozen, cut off, asked to leave and started again, and training never minds.

`DECOD_SOAK_S` sets for how long. `scripts/soak.py` does the same at length, beside a twin.
"""

import os
from pathlib import Path

import pytest

from tests.support.network import missing
from tests.support.soak import Plan, soak

SOAK_S = float(os.environ.get("DECOD_SOAK_S", "90"))

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(SOAK_S + 400)]


def test_a_storm_costs_members_that_step_by_themselves_little_of_the_loss(
    tmp_path: Path, corpus: Path
) -> None:
    """The logs are audited likewise. The loss at the end is that of a twin without faults."""
    plan = Plan(
        relays=(3,), num_data_nodes=1, storm_s=SOAK_S, networks=False, twin=True, local=True
    )
    outcome, _ = soak(plan, tmp_path, corpus)
    print(outcome)
    assert not outcome.complaints
    assert sum(outcome.faults.values()) >= SOAK_S / 20


@pytest.mark.parametrize("networks", [False, True], ids=["loopback", "networks"])
def test_a_storm_of_faults_costs_time_and_nothing_learnt(
    tmp_path: Path, corpus: Path, networks: bool
) -> None:
    """The logs of all lives of all nodes are audited, and the losses are those of one process."""
    if networks and (reason := missing()) is not None:
        pytest.skip(reason)
    plan = Plan(relays=(3, 3), num_data_nodes=2, storm_s=SOAK_S, networks=networks)
    (outcome,) = soak(plan, tmp_path, corpus)
    print(outcome)
    assert not outcome.complaints
    assert outcome.num_iterations > SOAK_S / 10
    assert sum(outcome.faults.values()) >= SOAK_S / 20
