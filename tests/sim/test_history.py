"""The audit of what nodes have logged passes a true history, and names what is wrong in another."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from decod.protocol.core.messages import Open
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import Organisation
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulated_host import SimHost
from decod.sim.simulation import Simulation
from tests.sim.test_elections import TOGETHER, simulation_of_death
from tests.sim.test_lost_stage import TOGETHER as LOSSES
from tests.sim.test_lost_stage import lose
from tests.support.history import Findings, check, lives_of, records_of, shares_of

Records = dict[str, list[dict[str, Any]]]

SCENARIO = Scenario(
    seed=5,
    batch=BatchConfig(num_data_nodes=2, num_microbatches=4),
    num_relays=6,
    stages=StagesConfig(num_relay_stages=2),
    num_iterations=12,
    duration_max_s=600.0,
    protocol=ProtocolConfig(min_data_nodes=2, min_nodes_per_stage=3),
    faults=(
        HostFault(FaultKind.RESTART, "relay1", after_num_events=300, duration_s=5.0),
        HostFault(FaultKind.KILL, "data0", after_num_events=900),
    ),
)


def recorded(simulation: Simulation) -> Records:
    """Returns where what each node logs will be, once the simulation has been run."""
    records: Records = {}
    lives: dict[str, int] = {}

    def noted(host: SimHost, event: str, fields: tuple[tuple[str, object], ...]) -> None:
        of_host = records.setdefault(host.name, [])
        if lives.setdefault(host.name, host.life) != host.life or not of_host:
            lives[host.name] = host.life
            of_host.append({"event": "node.started", "node_id": host.node_id})
        of_host.append({"event": event, **dict(fields)})

    simulation.checker.noted = noted  # type: ignore[method-assign]
    return records


@cache
def true_history() -> tuple[Records, int]:
    """Returns what each node of a simulated run with losses has logged, and its iterations."""
    simulation = Simulation(SCENARIO)
    records = recorded(simulation)
    return records, simulation.run().num_iterations


def audit(records: Records) -> Findings:
    return check([life for name, of_node in records.items() for life in lives_of(name, of_node)])


def commits_of(records: Records, node: str) -> list[dict[str, Any]]:
    return [record for record in records[node] if record["event"] == "step.committed"]


def test_a_true_history_passes() -> None:
    records, num_iterations = true_history()
    found = audit(records)
    shares = shares_of(found, num_data_nodes=2, num_microbatches=4)
    assert not found.violations, str(found)
    assert found.num_iterations == num_iterations == SCENARIO.num_iterations
    assert found.num_sums > 2 * num_iterations
    assert sorted(found.leaders) == [1, 2]
    assert shares[1] == (0, 1)
    assert shares[num_iterations] == (0, 1), "the other reads the lost leader's share"


@pytest.mark.parametrize("num_told", range(5))
def test_who_misses_the_word_of_a_commit_logs_it_all_the_same(num_told: int) -> None:
    """The leader dies while it tells of it; what its successor opens rests on that commit."""
    simulation = simulation_of_death(Open, num_told, vanish=False, seed=0)
    records = recorded(simulation)
    simulation.run()
    found = audit(records)
    assert not found.violations, str(found)
    assert found.num_iterations == TOGETHER.num_iterations


def test_a_run_that_goes_back_has_lost_nothing_either() -> None:
    simulation = Simulation(replace(LOSSES, seed=2, faults=(lose("relay1", 17.2),)))
    records = recorded(simulation)
    simulation.run()
    assert any("e1:" in str(record.get("iteration")) for record in records["relay0"])
    found = audit(records)
    assert not found.violations, str(found)
    assert found.num_iterations == LOSSES.num_iterations


SERVED = Scenario(
    seed=3,
    num_relays=4,
    stages=StagesConfig(num_relay_stages=2),
    num_clients=3,
    organisation=Organisation.SERVERS,
    num_iterations=8,
    batch=BatchConfig(num_microbatches=12),
    duration_max_s=600.0,
    protocol=ProtocolConfig(min_nodes_per_stage=2),
    faults=(HostFault(FaultKind.KILL, "client1", after_num_events=300),),
)


@cache
def served_history() -> Records:
    """Returns what the nodes of a run with servers have logged, of which a client is lost."""
    simulation = Simulation(SERVED)
    records = recorded(simulation)
    simulation.run()
    return records


def contributions(records: Records) -> list[dict[str, Any]]:
    """Return what the servers have logged of contributions that hold something."""
    told = [record for of_node in records.values() for record in of_node]
    averaged = (record for record in told if record["event"] == "contribution.averaged")
    return [record for record in averaged if record["num_folded"]]


def test_what_servers_have_averaged_is_checked_against_the_batch() -> None:
    records = served_history()
    found = audit(records)
    assert not found.violations, str(found)
    assert found.num_iterations == SERVED.num_iterations
    assert len(contributions(records)) > 4 * SERVED.num_iterations
    assert not found.num_partial


@pytest.mark.parametrize("field", ["num_folded", "digest_folded"])
def test_a_part_that_is_not_the_batch_is_found(field: str) -> None:
    records = deepcopy(served_history())
    contributions(records)[5][field] += 1
    (violation, *_) = audit(records).violations
    assert "and not the batch" in violation


def test_a_worker_that_has_folded_something_else_is_found() -> None:
    records = deepcopy(served_history())
    next(c for c in commits_of(records, "client0") if c.get("num_folded"))["digest_folded"] += 1
    violations = audit(records).violations
    assert violations
    assert all("which has folded" in violation for violation in violations)


def _lose_an_iteration(records: Records) -> None:
    for node in records:
        for record in commits_of(records, node):
            if record["iteration"].startswith("5."):
                records[node].remove(record)


def _skip_an_iteration(records: Records) -> None:
    records["relay0"].remove(commits_of(records, "relay0")[4])


def _fold_in_twice(records: Records) -> None:
    record = commits_of(records, "relay2")[3]
    record["num_folded"] += 1


def _fold_in_another(records: Records) -> None:
    record = commits_of(records, "relay2")[3]
    record["digest_folded"] += 1


def _differ_in_parameters(records: Records) -> None:
    commits_of(records, "relay4")[3]["parameter_hash"] = "0" * 64


def _differ_in_loss(records: Records) -> None:
    commits_of(records, "relay4")[3]["loss"] += 1e-9


def _commit_what_was_aborted(records: Records) -> None:
    for node in records:
        if node != "relay4":
            for record in commits_of(records, node):
                if record["iteration"].startswith("6."):
                    record["iteration"] = "6.7"


def _go_on_after_giving_up(records: Records) -> None:
    place = next(r for r in records["relay4"] if str(r.get("iteration")) == "6.1")
    later = {**place, "event": "iteration.opened", "iteration": "6.2", "term": 1, "leader": "?"}
    records["relay4"].insert(records["relay4"].index(place) + 1, later)


def _follow_another_leader(records: Records) -> None:
    opened = [r for r in records["relay4"] if r["event"] == "iteration.opened"]
    opened[3]["leader"] = "relay0"


def _go_back_in_time(records: Records) -> None:
    opened = [r for r in records["relay4"] if r["event"] == "iteration.opened"]
    opened[-1]["term"] = 1


@pytest.mark.parametrize(
    ("doctor", "rule"),
    [
        (_lose_an_iteration, "gaps: nobody has committed"),
        (_skip_an_iteration, "gaps: relay0"),
        (_fold_in_twice, "once: stage"),
        (_fold_in_another, "once: stage"),
        (_differ_in_parameters, "same: relay"),
        (_differ_in_loss, "same: relay"),
        (_commit_what_was_aborted, "same: relay4"),
        (_go_on_after_giving_up, "same: relay4"),
        (_follow_another_leader, "one leader: relay4"),
        (_go_back_in_time, "one leader: relay4"),
    ],
)
def test_what_is_wrong_is_named(doctor: Callable[[Records], None], rule: str) -> None:
    records = deepcopy(true_history()[0])
    doctor(records)
    assert [v for v in audit(records).violations if v.startswith(rule)], str(audit(records))


def test_a_microbatch_of_another_iteration_is_no_part_of_the_batch() -> None:
    records = deepcopy(true_history()[0])
    for node in records:
        for record in commits_of(records, node):
            if record["iteration"].startswith("4.") and "digest_batch" in record:
                record["digest_batch"] += 1
                record["digest_folded"] += 1
    found = audit(records)
    shares_of(found, num_data_nodes=2, num_microbatches=4)
    assert any("not whole shares" in v for v in found.violations)


def test_a_record_that_a_kill_cut_off_hides_nothing_else() -> None:
    whole = json.dumps({"time": "t", "event": "iteration.opened"})
    lines = [whole, whole[:20] + whole, "noise", whole[:30], '{"time": ' + "[" * 5000]
    assert len(list(records_of(lines))) == 2
