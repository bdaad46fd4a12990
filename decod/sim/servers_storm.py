"""Bad weather over runs whose stages are organised as servers.

Clients come and go at any time. Servers and data nodes have the faults that members of a pipeline
have.
"""

from dataclasses import replace

from decod.run.run_config import Organisation
from decod.sim.kernel import seeded
from decod.sim.scenario import FaultKind, HostFault, Scenario
from decod.sim.storm import BEGIN_S, honest_storm

_CLIENT_FAULTS = (
    *[FaultKind.RESTART] * 4,
    *[FaultKind.FREEZE] * 2,
    FaultKind.KILL,
    FaultKind.VANISH,
    FaultKind.COMPUTE,
    FaultKind.DRAIN,
    FaultKind.SLOW,
    FaultKind.PAUSE,
)
_DURATION_MAX_S = 12.0
_FAULTS_PER_CLIENT_MAX = 3

_SLOW_FORWARD_S = 1.5
_NUM_SLOW_ITERATIONS = 6


def servers_storm(seed: int) -> Scenario:
    """Return a small run with servers, and its weather.

    Every stage has two servers or three, and the run up to six clients. One client has no lasting
    fault. In every fourth run, nothing happens to the servers. In every other pair of runs, steps
    are late. In every third, iterations take so long that clients enter in the middle of them.
    """
    rng = seeded(seed, "servers storm")
    scenario = honest_storm(seed)
    num_clients = rng.randint(1, 6)
    scenario = replace(
        scenario,
        organisation=Organisation.SERVERS,
        num_clients=num_clients,
        servers=replace(scenario.servers, delay=seed // 2 % 2),
        batch=replace(scenario.batch, num_microbatches=rng.randint(2, 6)),
        protocol=replace(scenario.protocol, routing="flow"),
        faults=() if seed % 4 == 3 else scenario.faults,
    )
    if seed % 3 == 0:
        slow = replace(scenario.profile, forward_s=_SLOW_FORWARD_S)
        scenario = replace(scenario, profile=slow, num_iterations=_NUM_SLOW_ITERATIONS)
    calm_s = (scenario.calm_s or 0.0) - _DURATION_MAX_S
    faults = []
    for index in range(num_clients):
        for _ in range(rng.randint(0, _FAULTS_PER_CLIENT_MAX)):
            kind = rng.choice(_CLIENT_FAULTS if index else _CLIENT_FAULTS[:6])
            at_s = round(rng.uniform(BEGIN_S, calm_s), 3)
            duration_s = round(rng.uniform(0.3, _DURATION_MAX_S), 3)
            faults.append(HostFault(kind, f"client{index}", at_s=at_s, duration_s=duration_s))
    both = sorted((*scenario.faults, *faults), key=lambda fault: fault.at_s or 0.0)
    if seed % 3 == 0:
        # A pass would take a minute, and the run would seem to stand still.
        both = [fault for fault in both if fault.kind is not FaultKind.SLOW]
    return replace(scenario, faults=tuple(both))
