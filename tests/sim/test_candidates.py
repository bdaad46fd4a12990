"""Nobody waits for a candidate that is gone, and one that was only slow is taken in again."""

import re

from decod.run.protocol_config import ProtocolConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import LinkFaults
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Simulation

PAIRS = ProtocolConfig(min_nodes_per_stage=2, min_data_nodes=2)
"""The start waits for two of each."""


def when(trace: str, text: str) -> float:
    """Return when the leader first said something."""
    found = re.search(rf"^ *([\d.]+) data0 +{text}", trace, re.MULTILINE)
    assert found is not None, f"never said {text!r}: {trace}"
    return float(found[1])


def gathered(*faults: HostFault, **how: LinkFaults) -> str:
    """Return the trace of a run whose last relay comes after 30 s."""
    scenario = Scenario(
        batch=BatchConfig(num_data_nodes=2),
        num_relays=4,
        protocol=PAIRS,
        faults=(
            *faults,
            HostFault(FaultKind.RESTART, "relay3", before_message=("Join", 1), duration_s=30.0),
        ),
        **how,
    )
    return "\n".join(Simulation(scenario).run().trace)


def test_a_run_does_not_begin_with_those_that_died_while_it_gathered() -> None:
    died = (
        HostFault(FaultKind.RESTART, "data1", before_message=("Prepared", 3), duration_s=60.0),
        HostFault(FaultKind.RESTART, "relay1", before_message=("Prepared", 3), duration_s=70.0),
    )
    trace = gathered(*died)
    assert when(trace, "data1 is gone, who was to enter") < 20.0
    assert when(trace, "relay1 is gone, who was to enter") < 20.0
    assert 70.0 < when(trace, "training begins") < 85.0
    assert "lost" not in trace


def test_candidates_that_stood_still_are_taken_in_again() -> None:
    """They think that they stand prepared, but the leader has forgotten them meanwhile."""
    froze = [
        HostFault(FaultKind.FREEZE, name, before_message=(kind, 1), duration_s=40.0)
        for name, kind in (("data1", "Prepared"), ("relay0", "Join"), ("relay1", "Prepared"))
    ]
    trace = gathered(*froze)
    assert when(trace, "data1 is gone, who was to enter") < 20.0
    assert 40.0 < when(trace, "training begins") < 55.0
    assert "lost" not in trace


def test_a_candidate_is_not_forgotten_because_messages_are_lost() -> None:
    trace = gathered(link_faults=LinkFaults(loss_ratio=0.05))
    assert "is gone, who was to enter" not in trace
