"""Safeguards of the protocol, their removal, and the weather in which the removal is noticed.

A *mutation* replaces one expression in the source of one function. An invariant of the simulator
notices it, or an assertion of the core fails. This proves that the safeguard is needed.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from decod.protocol import node_machine as node_module
from decod.protocol.averaging.averager import Averager
from decod.protocol.core import dispatch as dispatch_module
from decod.protocol.leadership.election import Campaign, Election
from decod.protocol.leadership.leader import Batch
from decod.protocol.leadership.leadership import Leadership
from decod.protocol.leadership.sync_schedule import SyncSchedule
from decod.protocol.node_machine import NodeMachine
from decod.protocol.state.replay_sources import ReplaySource
from decod.protocol.strategy import data_microbatches as data_module
from decod.protocol.strategy.data_share import ShareReport
from decod.protocol.strategy.relay_microbatches import RelayMicrobatches
from decod.sim.elections import (
    election_storm,
    heard_twice,
    late_parts,
    small_half,
    unheard_leader,
)
from decod.sim.network import Links, LinkSpec
from decod.sim.scenario import Scenario, sync_of
from decod.sim.storm import honest_storm, local_storm, storm_scenario, weather


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A safeguard, and its removal."""

    name: str
    without: str
    """The effect of the removal."""
    owner: type | object
    function: str
    old: str
    new: str
    seed: int
    """A seed that notices. Others do too, but it may take some time to find them."""
    drawn: Callable[[int], Scenario] = election_storm
    """The weather: returns the scenario of a seed."""


def slow_sender(seed: int) -> Scenario:
    """Return a run in which one relay sends so slowly that a quorum goes on without it."""
    profile = replace(Scenario(seed=seed).profile, activation_bytes=1000)
    run = Scenario(
        seed=seed,
        num_relays=6,
        num_iterations=12,
        sync=sync_of(3, overlap=True, quorum=0.6),
        profile=profile,
    )
    usual = run.links.default
    slow = LinkSpec(usual.latency_s, usual.bandwidth_bytes_per_s / 200)
    others = [name for name in run.host_names if name != "relay0"]
    return replace(run, links=Links(usual, {("relay0", other): slow for other in others}))


MUTATIONS = (
    Mutation(
        name="fence",
        without="who has missed a commit goes on with its old parameters",
        owner=node_module,
        function="in_step",
        old="return anchor == strategy.copy.stage.iteration or voted",
        new="return True",
        seed=44,
    ),
    Mutation(
        name="term",
        without="a decision counts by its iteration, whoever has made it",
        owner=NodeMachine,
        function="_opened",
        old="(told.opening.view.term, told.opening.iteration) <= here",
        new="told.opening.iteration <= here[1]",
        seed=179546025648807,
    ),
    Mutation(
        name="vote",
        without="a second candidate of the same term gets a vote too",
        owner=Election,
        function="stood",
        old="message.term <= self.voter.term",
        new="message.term < self.voter.term",
        seed=1,
    ),
    Mutation(
        name="quorum",
        without="the first vote elects",
        owner=Campaign,
        function="_chosen_by",
        old="return is_quorum(nodes, self._electors) and "
        "is_quorum(nodes, ids_of(self._context.view))",
        new="return len(nodes) > 1",
        seed=4,
        drawn=partial(election_storm, plot=small_half),
    ),
    Mutation(
        name="bound",
        without="who has voted for another leader still votes for iterations of the old one",
        owner=Leadership,
        function="fence",
        old="return vote and self.election.voter.bound",
        new="return False",
        seed=1254,
        drawn=partial(election_storm, plot=unheard_leader),
    ),
    Mutation(
        name="roster",
        without="parts and votes of another view count",
        owner=dispatch_module,
        function="_place_of",
        old="return message.averaging.iteration, message.averaging.view_version",
        new="return message.averaging.iteration, view_version",
        seed=258,
        drawn=partial(election_storm, plot=late_parts),
    ),
    Mutation(
        name="dedup",
        without="a repeated activation is computed again",
        owner=RelayMicrobatches,
        function="activation",
        old="known = self.held.get(microbatch) or self.done.get(microbatch)",
        new="known = None",
        seed=0,
        drawn=partial(election_storm, plot=heard_twice),
    ),
    Mutation(
        name="positions",
        without="the shares of a lost data node are read by nobody",
        owner=data_module,
        function="shares_of",
        old="return (own, *dealt)",
        new="return (own,)",
        seed=0,
    ),
    Mutation(
        name="debt",
        without="a share is reported before what was lost is mended",
        owner=ShareReport,
        function="report",
        old="waiting or self.owing",
        new="waiting",
        seed=37,
    ),
    Mutation(
        name="late",
        without="who comes too late for an average is not told so, and waits for it as a member",
        owner=ReplaySource,
        function="follow",
        old="max(self._stage.iteration + self._lead(now_s), self._past)",
        new="self._stage.iteration + self._lead(now_s)",
        seed=179546025648786,
        drawn=storm_scenario,
    ),
    Mutation(
        name="last",
        without="an average that is lost is not sent again to who has entered meanwhile",
        owner=ReplaySource,
        function="_follower",
        old="self._known.get(node) or self._entered.get(node)",
        new="self._known.get(node)",
        seed=651,
        drawn=honest_storm,
    ),
    Mutation(
        name="share",
        without="the batch is complete before all data nodes have reported",
        owner=Batch,
        function="report",
        old="if len(self._reports) < len(view.data_nodes):",
        new="if False:",
        seed=0,
    ),
    Mutation(
        name="reread",
        without="nobody says what is read again",
        owner=ShareReport,
        function="report",
        old="num_reread=len(again.intersection(done)),",
        new="num_reread=0,",
        seed=9,
        drawn=local_storm,
    ),
    Mutation(
        name="arrival",
        without="another leader takes an arrival for an iteration like others",
        owner=SyncSchedule,
        function="resume",
        old="self._opened = opening",
        new="self._opened = None",
        seed=85,
        drawn=local_storm,
    ),
    Mutation(
        name="unsaid",
        without="a mean does not say whose contribution it lacks",
        owner=Averager,
        function="_reduced",
        old="self._phase, missing",
        new="self._phase, ()",
        seed=1,
        drawn=slow_sender,
    ),
)


CONFIRM = Mutation(
    name="confirm",
    without="who is elected commits the iteration without having asked again",
    owner=Campaign,
    function="_conclude",
    old="if not ballot.proposed:",
    new="if True:",
    seed=0,
)
"""Noticed in made-up elections, in its own tests: it takes four things at once."""


@contextmanager
def mutated(mutation: Mutation) -> Iterator[None]:
    """Replace one function by a copy of its source in which one expression is different."""
    original = getattr(mutation.owner, mutation.function)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutation.old) == 1, f"{mutation.name}: the code has changed"
    scope: dict[str, object] = {}
    exec(source.replace(mutation.old, mutation.new), original.__globals__, scope)
    setattr(mutation.owner, mutation.function, scope[mutation.function])
    try:
        yield
    finally:
        setattr(mutation.owner, mutation.function, original)


@dataclass(frozen=True, slots=True)
class Notice:
    """The failure that shows that a safeguard is missing."""

    seed: int
    num_seeds: int
    """Number of seeds tried until then."""
    what: str
    """The invariant and its message."""


def notice(mutation: Mutation, seeds: Iterable[int]) -> Notice | None:
    """Run seeds without the safeguard until one fails. Return the failure, or None."""
    with mutated(mutation):
        for num, seed in enumerate(seeds, 1):
            if what := _failure(mutation, seed):
                return Notice(seed, num, what)
    return None


def _failure(mutation: Mutation, seed: int) -> str:
    # Outside: a storm that can't be drawn notices nothing.
    scenario = mutation.drawn(seed)
    try:
        failures, _ = weather([seed], lambda _: scenario)
    except Exception as error:  # noqa: BLE001 - A mutant may do anything.
        return f"{type(error).__name__}: {error}"
    return failures[0].partition("\n")[0].partition(": ")[2] if failures else ""
