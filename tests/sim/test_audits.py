"""Liars in simulated runs: they are found, and honest nodes never are."""

from dataclasses import replace

import pytest

from decod.protocol.core.effects import SendTensor
from decod.protocol.core.messages.audit_messages import AuditCase
from decod.protocol.strategy.witnessing import Audits
from decod.run.protocol_config import AuditConfig
from decod.run.stages_config import StagesConfig
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.simulation import Result, Simulation
from decod.sim.storm import honest_storm
from tests.support.quick import first_of

SHARE = 0.2
BEGINS_S = 30.0


def run(scenario: Scenario, *liars: str) -> tuple[Result, list[str], set[str]]:
    """Return how a run went, the lines of its trace about audits, and who was named.

    Args:
        scenario: What happens.
        liars: Hosts that lie in a way that the scenario does not tell.
    """
    simulation = Simulation(scenario)
    simulation.world.liars.update(simulation.hosts[name].node_id for name in liars)
    result = simulation.run()
    lines = [line for line in result.trace if " LIES: " in line or " lies: " in line]
    return result, lines, {line.split()[2] for line in lines if " LIES: " in line}


def scenario_with(seed: int, kind: FaultKind | None, share: float = SHARE) -> Scenario:
    faults = () if kind is None else (HostFault(kind, "relay1", at_s=BEGINS_S),)
    return Scenario(
        seed=seed,
        num_relays=9,
        stages=StagesConfig(num_relay_stages=3),
        num_iterations=30,
        faults=faults,
        audits=AuditConfig(share=share, share_in_probation=share),
    )


def honest_iterations(seed: int) -> int:
    """Check that nobody is named in a storm; return its number of iterations."""
    audits = AuditConfig(share=SHARE, share_in_probation=SHARE)
    scenario = replace(honest_storm(seed), audits=audits)
    result, lines, named = run(scenario)
    assert not named, (seed, lines)
    return result.num_iterations


@pytest.mark.parametrize("seed", first_of(range(3)))
@pytest.mark.parametrize("kind", [FaultKind.LIE, FaultKind.MEANS, FaultKind.ACCUSE])
def test_a_liar_leaves_and_nobody_else_is_named(seed: int, kind: FaultKind) -> None:
    """Who accuses falsely is in dispute with each member that it accuses, until it is named."""
    _, lines, named = run(scenario_with(seed, kind, share=0.5))
    if kind is not FaultKind.ACCUSE:
        assert named == {"relay1"}
    assert named <= {"relay1"}
    assert named or any(" or another member lies: " in line for line in lines)


def test_a_relay_that_says_nothing_of_its_false_means_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here no audited relay says what it got. It matters only where something is wrong."""
    tell = Audits._tell_of_shares

    def silent(self: Audits, case: AuditCase) -> None:
        if self._context.node_id != case.relay:
            tell(self, case)

    monkeypatch.setattr(Audits, "_tell_of_shares", silent)
    _, _, named = run(scenario_with(0, FaultKind.MEANS, share=0.5))
    assert named == {"relay1"}


def pairs(seed: int, kind: FaultKind) -> Scenario:
    """Return a scenario with two relays in each of two stages."""
    scenario = scenario_with(seed, kind, share=0.5)
    return replace(
        scenario,
        num_relays=4,
        stages=replace(scenario.stages, num_relay_stages=2),
        num_iterations=20,
    )


@pytest.mark.parametrize("seed", first_of(range(6)))
def test_between_the_only_two_of_a_stage_the_leader_judges(seed: int) -> None:
    result, lines, named = run(pairs(seed, FaultKind.LIE))
    assert named == {"relay1"}
    assert len(lines) == 1
    assert result.num_iterations == 20


@pytest.mark.parametrize("seed", first_of(range(6)))
@pytest.mark.parametrize("kind", [FaultKind.MEANS, FaultKind.ACCUSE])
def test_what_the_leader_can_not_judge_is_repeated_and_nobody_leaves(
    seed: int, kind: FaultKind
) -> None:
    """Both are named in the end, unless the false accuser is."""
    result, _, named = run(pairs(seed, kind))
    assert not named
    assert result.num_iterations == 20
    repeats = [line for line in result.trace if " is repeated: " in line]
    assert len(repeats) <= 3 * 2, "of either as the relay, and as the other"
    assert any("used all the same" in line for line in result.trace) or len(repeats) < 4


@pytest.mark.parametrize("seed", first_of(range(4)))
def test_a_relay_that_says_nothing_of_its_passes_leaves_and_is_not_banned(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    tell = Audits._tell_of_passes

    def silent(self: Audits, case: AuditCase) -> None:
        own = self._context.node_id == case.relay
        quiet = own and self._context.member.name == "relay1" and self._context.now_s > BEGINS_S
        if not quiet:
            tell(self, case)

    monkeypatch.setattr(Audits, "_tell_of_passes", silent)
    result, lines, named = run(scenario_with(seed, None, share=0.5))
    told = [line.split() for line in result.trace if "does not tell its auditors" in line]
    aside = {words[2] for words in told} - {"iteration"}
    assert aside == {"relay1"}
    assert not named, lines


@pytest.mark.parametrize("seed", first_of(range(4)))
def test_a_relay_that_lies_about_what_it_gave_is_named_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    tell = Audits._tell_of_passes

    def lie(self: Audits, case: AuditCase) -> None:
        out = self._context.out
        before = out.taken()
        tell(self, case)
        told = out.taken()
        tensors = [effect for effect in told if isinstance(effect, SendTensor)]
        liar = self._context.member.name == "relay1" and self._context.now_s > BEGINS_S
        if not liar or case.relay == self._context.node_id:
            out.put(*before, *told)
            return
        rest = [effect for effect in told if effect not in tensors]
        turned = zip(tensors, tensors[1:] + tensors[:1], strict=True)
        lies = [replace(one, tensor=other.tensor) for one, other in turned]
        out.put(*before, *rest, *lies)

    monkeypatch.setattr(Audits, "_tell_of_passes", lie)
    _, lines, named = run(scenario_with(seed, None, share=0.5), "relay1")
    assert named <= {"relay1"}
    assert named, lines


def test_a_liar_is_found_as_soon_as_the_share_says() -> None:
    """The mean number of iterations until it is caught is one over the share."""
    waited = list[int]()
    for seed in range(12):
        scenario = scenario_with(seed, FaultKind.LIE, share=0.4)
        one = StagesConfig(num_relay_stages=1)
        small = replace(scenario, num_relays=3, stages=one, num_iterations=20)
        result, lines, named = run(small)
        assert named <= {"relay1"}
        found_s = float(lines[0].split()[0])
        commits = [line for line in result.trace if " is committed" in line]
        instants = [float(line.split()[0]) for line in commits]
        waited.append(sum(BEGINS_S < instant < found_s for instant in instants))
    assert 0.5 <= sum(waited) / len(waited) < 3.5, "1.5 iterations are expected to be committed"


def test_honest_nodes_are_never_named_in_a_storm() -> None:
    """Crashes, cuts and lost messages may leave an audit unfinished. They look like no lie."""
    assert sum(honest_iterations(seed) for seed in range(12)) > 50


@pytest.mark.slow
def test_honest_nodes_are_never_named_in_2000_iterations() -> None:
    num_iterations, seed = 0, 100
    while num_iterations < 2000:
        seed += 1
        num_iterations += honest_iterations(seed)
