"""Decisions keep their seals on all ways down the tree: passed on, shortened, asked for again.

A seal here is a hash of what a real one signs. So a node drops what any other has altered.
"""

from functools import partial
from hashlib import sha256
from typing import Any

import pytest

from decod.ids import RunId
from decod.membership.statements import DecisionSeals
from decod.protocol.core.context import Identity
from decod.protocol.core.seals import Decision
from decod.protocol.core.view import Role
from decod.sim import core
from decod.sim.elections import election_storm
from decod.sim.simulation import Simulation
from decod.sim.storm import storm_scenario
from tests.support.members import data_node

OF = DecisionSeals(data_node("leader"), RunId("r" * 26), lambda: 0.0)


class Hashes:
    """Seals of one simulated node."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.num_checked = 0
        self.faults: list[str] = []

    def seal_of(self, decision: Decision) -> bytes:
        return sha256(OF._body(decision)).digest() if self._role is Role.DATA else b""

    def fault_of(self, decision: Decision) -> str:
        self.num_checked += 1
        if decision.seal == sha256(OF._body(decision)).digest():
            return ""
        self.faults.append(type(decision).__name__)
        return "it was altered" if decision.seal else "it has no seal"


@pytest.fixture
def sealing(monkeypatch: pytest.MonkeyPatch) -> list[Hashes]:
    """Gives each simulated node seals; returns them."""
    given: list[Hashes] = []

    def identity(**fields: Any) -> Identity:
        given.append(Hashes(fields["role"]))
        return Identity(**fields, seals=given[-1])

    monkeypatch.setattr(core, "Identity", identity)
    return given


@pytest.mark.parametrize("storm", [storm_scenario, election_storm], ids=["storm", "elections"])
def test_no_decision_of_a_data_node_is_doubted(sealing: list[Hashes], storm: object) -> None:
    assert callable(storm)
    for seed in range(6):
        sealing.clear()
        result = Simulation(partial(storm, seed)()).run()
        assert result.num_iterations or result.waits_for
        assert not [fault for seals in sealing for fault in seals.faults], seed
        assert sum(seals.num_checked for seals in sealing) > 10
