"""Safeguards of stages with servers, and their removal, as in `tests.support.mutations`."""

from dataclasses import replace
from functools import partial

from decod.protocol.state.client_copy import ClientState
from decod.protocol.strategy.servers.backward import BackwardServer
from decod.protocol.strategy.servers.frontal import FrontalServer
from decod.protocol.strategy.servers.home import HomeMicrobatches
from decod.protocol.strategy.servers.placement import Placement
from decod.protocol.strategy.servers.servers import Servers
from decod.protocol.strategy.servers.worker import Worker
from decod.run.protocol_config import ProtocolConfig
from decod.run.run_config import Organisation
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import LinkFaults
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.storm import servers_storm
from tests.support.mutations import Mutation


def impatient(seed: int) -> Scenario:
    """Return a storm in which backward passes are often revoked: servers ask every 50 ms,
    devices are slow for a while, and links repeat and reorder messages."""
    storm = servers_storm(3 * seed + 1)
    slowed = [
        HostFault(FaultKind.SLOW, name, at_s=3.0 + index, duration_s=2.0 + seed % 5)
        for index, name in enumerate(storm.host_names[storm.batch.num_data_nodes :])
    ]
    return replace(
        storm,
        seed=seed,
        batch=replace(storm.batch, num_microbatches=6),
        protocol=replace(storm.protocol, complete_timeout_s=0.05),
        faults=(*storm.faults, *slowed),
        link_faults=LinkFaults(
            duplicate_ratio=0.05, delay_ratio=0.1, reorder_ratio=0.1, until_s=storm.calm_s or 0.0
        ),
    )


def hasty(seed: int) -> Scenario:
    """Return a run of few workers that are slow in turn, over links that repeat and delay much.

    So a worker gives an attempt up several times, and gets the next one meanwhile.
    """
    slowed = [
        HostFault(
            FaultKind.SLOW,
            f"relay{index}",
            at_s=2.5 + 0.7 * index + 3.0 * turn + seed % 7 / 7,
            duration_s=2.0,
        )
        for turn in range(6)
        for index in range(2)
    ]
    return Scenario(
        seed=seed,
        organisation=Organisation.SERVERS,
        num_relays=2,
        stages=StagesConfig(num_relay_stages=1),
        num_clients=seed % 2,
        batch=BatchConfig(num_microbatches=8),
        num_iterations=12,
        capacity_min=4,
        capacity_max=6,
        calm_s=24.0,
        protocol=ProtocolConfig(min_nodes_per_stage=2, complete_timeout_s=0.05),
        faults=tuple(slowed),
        link_faults=LinkFaults(
            duplicate_ratio=0.3,
            delay_ratio=0.4,
            reorder_ratio=0.3,
            delay_max_s=2.0,
            until_s=24.0,
        ),
    )


def slow_home(seed: int) -> Scenario:
    """Return a storm in which data nodes take long for their own backward passes."""
    storm = servers_storm(3 * seed)
    return replace(storm, seed=seed, profile=replace(storm.profile, embed_s=1.0))


def _stage_of(
    num_servers: int, faults: list[HostFault], seed: int, *, num_clients: int, num_microbatches: int
) -> Scenario:
    """Return a run of one stage, which begins when all its servers are there."""
    return Scenario(
        seed=seed,
        organisation=Organisation.SERVERS,
        num_relays=num_servers,
        stages=StagesConfig(num_relay_stages=1),
        num_clients=num_clients,
        batch=BatchConfig(num_microbatches=num_microbatches),
        num_iterations=20,
        calm_s=24.0,
        protocol=ProtocolConfig(min_nodes_per_stage=num_servers),
        faults=tuple(faults),
    )


def many_servers(seed: int) -> Scenario:
    """Return a run with six servers, which start again and again, and a client."""
    faults = [
        HostFault(FaultKind.RESTART, f"relay{index}", at_s=4.0 + 1.7 * index + seed % 7 / 10)
        for index in range(6)
    ]
    return _stage_of(6, faults, seed, num_clients=2, num_microbatches=9)


def flipped(seed: int) -> Scenario:
    """Return a run in which a bit of a server's parameters flips."""
    faults = [HostFault(FaultKind.FLIP, "relay3", at_s=4.0 + seed % 20 / 10)]
    return _stage_of(4, faults, seed, num_clients=3, num_microbatches=6)


_Mutation = partial(Mutation, drawn=servers_storm)

SERVERS_MUTATIONS = (
    _Mutation(
        name="taken",
        without="a backward pass that one worker has is given to another too",
        owner=BackwardServer,
        function="_assign",
        old="taken = output.folded or output.worker is not None",
        new="taken = output.folded",
        seed=0,
    ),
    _Mutation(
        name="revoked",
        without="a worker takes a backward pass that it has given up",
        owner=Worker,
        function="gradient",
        old="self._given_up.get(microbatch, (0, 0)) >= attempt",
        new="False",
        seed=3,
        drawn=impatient,
    ),
    _Mutation(
        name="attempt",
        without="giving up an earlier attempt counts as giving up the present one",
        owner=BackwardServer,
        function="unable",
        old="(output.worker, output.attempt) != (sender, message.attempt)",
        new="output.worker != sender",
        seed=77,
        drawn=hasty,
    ),
    _Mutation(
        name="begun",
        without="a worker gives up a backward pass that is under way",
        owner=Worker,
        function="_give_back",
        old="if not self._context.compute.withdraw(task.job):",
        new="if self._context.compute.withdraw(task.job) is None:",
        seed=2,
        drawn=impatient,
    ),
    _Mutation(
        name="returned",
        without="a data node folds in a gradient that comes twice, twice",
        owner=HomeMicrobatches,
        function="gradient",
        old="held is None or held.phase is not Phase.AWAITING_GRADIENT",
        new="held is None",
        seed=32,
        drawn=slow_home,
    ),
    _Mutation(
        name="unheard",
        without="who takes a lost server's place does not wait for what workers have",
        owner=BackwardServer,
        function="_assign",
        old="taken or self._unheard",
        new="taken",
        seed=17,
    ),
    _Mutation(
        name="holding",
        without="workers don't say what they have of a lost server's microbatches",
        owner=Worker,
        function="_tell_holding",
        old="if self._backward(m) == server",
        new="if self._backward(m) == server and task.phase is not TaskPhase.FOLDED",
        seed=17,
    ),
    _Mutation(
        name="undone",
        without="what a lost worker had folded in still counts",
        owner=BackwardServer,
        function="mend",
        old="output.folded = False",
        new="pass",
        seed=5,
    ),
    _Mutation(
        name="whole",
        without="workers contribute before the whole batch is in their sums",
        owner=Servers,
        function="_contribute",
        old="added(self._settled.values()) == batch",
        new="True",
        seed=26,
    ),
    _Mutation(
        name="view",
        without="what servers had in a larger view still counts in a smaller one",
        owner=Servers,
        function="_begin_step",
        old="self._settled.clear()",
        new="pass",
        seed=1,
    ),
    _Mutation(
        name="hash",
        without="a client computes with parameters that are not those that were voted on",
        owner=ClientState,
        function="use",
        old="self.lacks(iteration, parameter_hash)",
        new='parameter_hash = ""; self.lacks(iteration, parameter_hash)',
        seed=34,
        drawn=flipped,
    ),
    _Mutation(
        name="placed",
        without="after a loss all microbatches are dealt out again, and not only the lost one's",
        owner=Placement,
        function="_at",
        old="kind = self._of(stage_index, duty)",
        new="kind = servers_of(view.roster(stage_index), duty)",
        seed=62,
        drawn=many_servers,
    ),
    _Mutation(
        name="silent",
        without="what a lost worker had is given to nobody else",
        owner=FrontalServer,
        function="mend",
        old="entry.state is InputState.GIVEN and not having",
        new="False",
        seed=0,
    ),
)
