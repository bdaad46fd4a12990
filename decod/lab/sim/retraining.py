"""SWARM and DeDLOC on the instances of the paper on reliable and unreliable parameter servers.

Both are cost models in virtual time. What a lost host had learnt in a batch is lost, and is trained
again by the others in the same batch: "when a device leaves, the training data processed by that
device is lost, requiring retraining". A batch ends when all of its microbatches count.

SWARM is `decod.lab.sim.swarm.Pipelines` on a `decod.lab.sim.cluster.Cluster`, with these
differences:

- A sender chooses the peer that would have finished one more microbatch first, if its work so far
  took its usual time: links and devices both count. Only links count in `Pipelines`.
- A stage counts the gradients in the sums of its living hosts, as hivemind's progress tracker does.
  A batch ends when every stage has all of them. If gradients are lost, further microbatches go
  through all stages. One of them makes up for one lost gradient in each stage.
- Data, loss and embedding cost nothing. The host that has them reaches all others at once.
- A host that comes back has its stage's state at once. Losses while a batch is averaged cost only
  another average.
- A host holds a limited number of microbatches (`_num_held`), which keeps the others for whoever
  has time.

DeDLOC is plain data parallelism: every host computes the whole model, one microbatch after another,
until all microbatches of the batch are there. The paper doesn't say how 33 billion parameters fit
into a host. Here they do, and loading layers from host memory costs nothing. Gradients are then
averaged in parts. DeDLOC's linear program sizes them by the links. With a bandwidth for each pair
of hosts its solution is simple: a part is as large as the slowest link of its owner is fast.

SWARM's stages average in the same way. If all layers share their parameters, all hosts average.

Source: SWARM (arXiv:2301.11913), section 3.2; DeDLOC (arXiv:2106.10207), section 3.2; the paper on
parameter servers, section 4.
"""

import heapq
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from typing_extensions import override

from decod.lab.sim.cluster import Cluster, Peer, Trip
from decod.lab.sim.server_instances import Allocation, Instance
from decod.lab.sim.swarm import Pipelines
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import Churn, HostSpec, Instants, Scenario

_HOME = "home"
_FREE = LinkSpec(latency_s=0.0, bandwidth_bytes_per_s=1e15)


def parts_s(instance: Instance, names: Sequence[str], num_bytes: float) -> float:
    """Return how long hosts take to average a tensor, in parts sized by their links.

    Every host owns a part. All send it theirs at once, over links of their own, and get the mean
    back.
    """
    if len(names) == 1:
        return 0.0
    rates = [
        min(
            instance.links[pair].bandwidth_bytes_per_s
            for other in names
            if other != owner
            for pair in ((owner, other), (other, owner))
        )
        for owner in names
    ]
    latency_s = max(instance.links[a, b].latency_s for a in names for b in names if a != b)
    return 2 * (num_bytes / sum(rates) + latency_s)


# --- SWARM ------------------------------------------------------------------------------------


class Balanced(Pipelines):
    """SWARM's wiring by throughput: to the peer that has one more microbatch done first."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._stage_cluster = cluster

    @override
    def _order(self, here: Peer, peer: Peer) -> tuple[float, float]:
        each_s = (1 + peer.profile.backward_ratio) * peer.profile.forward_s
        link_s = self._stage_cluster.distance_s(here, peer)
        queued_s = (self._under_way[here, peer] + 1) * link_s
        busy_s = (len(self._held[peer]) + 1) * each_s
        return max(queued_s, busy_s) + link_s, self._rng.random()


class _Pinned(Instants):
    """Counts all instants in the length of the first iteration, which has no losses."""

    @override
    def opened(self, now_s: float, iteration: int) -> list[tuple[float, Churn]]:
        # The median of these two alone.
        del self._opened_s[2:]
        begins = list(self._opened_s)
        found = super().opened(begins[1] if len(begins) > 1 else now_s, iteration)
        self._opened_s = begins if len(begins) > 1 else self._opened_s
        return found


class Retraining(Cluster):
    """A cluster whose batch ends when no stage lacks gradients that it has lost with a host.

    Args:
        instance: The setting.
        allocation: The hosts of each stage.
        num_batches: Batches with losses, after one without.
    """

    def __init__(self, instance: Instance, allocation: Allocation, *, num_batches: int) -> None:
        self._instance = instance
        self._allocation = allocation
        self._num_averages = 0
        self._spared: set[Peer] = set()
        """Hosts that were lost while a batch was averaged: that has their gradients."""
        super().__init__(server_scenario(instance, allocation, num_batches), Balanced)
        self._instants = _Pinned(self.scenario.churn)

    @override
    def finish(self, trip: Trip) -> None:
        trip.done = True
        self._refill()
        if all(other.done for other in self._trips):
            # Numbers of its own: an earlier average may be planned still.
            self._num_averages += 1000
            self._average(self._num_averages)

    def _num_missing(self) -> int:
        """Return how many gradients the stage lacks that has lost the most."""
        gone = {peer for peer in self.peers.values() if not peer.serving} - self._spared
        if not gone:
            return 0
        counts = [0] * (self.scenario.stages.num_relay_stages + 1)
        for trip in self._trips:
            lost = {peer.stage_index for peer in trip.folded & gone}
            for stage in range(1, len(counts)):
                counts[stage] += stage not in lost
        return max(0, self.scenario.batch.num_microbatches - min(counts[1:]))

    def _refill(self) -> None:
        """Send off more microbatches for gradients that are lost."""
        home = self.peers[_HOME]
        for _ in range(self._num_missing()):
            trip = Trip(home)
            self._trips.append(trip)
            self._policy.begin(trip)

    @override
    def _open(self, iteration: int) -> None:
        self._spared.clear()
        super()._open(iteration)

    @override
    def _crash(self, peer: Peer) -> None:
        if self._averaging is not None:
            self._spared.add(peer)
        super()._crash(peer)

    @override
    def _notice(self, peer: Peer, life: int) -> None:
        if not peer.missed or peer.life != life:
            return
        if self._num_missing():
            self._averaging = None
        super()._notice(peer, life)
        if self._averaging is None:
            self._refill()

    @override
    def _load(self, peer: Peer, life: int) -> None:
        if peer.life == life:
            self._loaded(peer, life)

    @override
    def _averaging_s(self) -> float:
        model = self._instance.model
        if model.shares_layers:
            alive = [peer.name for peer in self.peers.values() if peer.stage_index and peer.serving]
            return parts_s(self._instance, alive, model.layer_bytes)
        return max(
            parts_s(
                self._instance,
                [name for name in names if self.peers[name].serving],
                num_layers * model.layer_bytes,
            )
            for names, num_layers in zip(
                self._allocation.stages, self._allocation.num_layers, strict=True
            )
        )


def _num_held(allocation: Allocation, names: Sequence[str]) -> int:
    """Return how many microbatches a host of a stage holds: three times what keeps all busy."""
    num_hosts = sum(map(len, allocation.stages))
    return math.ceil(3 * num_hosts / len(names)) + 1


def server_scenario(instance: Instance, allocation: Allocation, num_batches: int) -> Scenario:
    """Return an instance as a scenario of one data node and relays.

    The data node, `home`, has the data and the loss, and computes nothing. Iteration 1 has no
    losses. Iteration 2 + b has those of batch b, and the return of the hosts that batch b - 1 lost.

    Stages average by themselves, even if layers share their parameters. Each sends its own only.
    """
    model = instance.model
    parameter_bytes = [
        (1 if model.shares_layers else num) * model.layer_bytes for num in allocation.num_layers
    ]
    shared = ComputeProfile(
        embed_s=0.0,
        head_s=0.0,
        optimizer_s=0.0,
        reduce_s=0.0,
        jitter_ratio=0.0,
        activation_bytes=model.activation_bytes,
        parameter_bytes=max(parameter_bytes),
    )
    described = {host.name: host for host in instance.hosts}
    hosts = [HostSpec(name=_HOME, stage_index=0, capacity=model.num_microbatches, profile=shared)]
    stages = zip(allocation.stages, allocation.num_layers, strict=True)
    for index, (names, num_layers) in enumerate(stages):
        for name in names:
            host = described[name]
            profile = replace(
                shared,
                forward_s=num_layers * host.forward_s,
                backward_ratio=host.backward_s / host.forward_s,
                parameter_bytes=parameter_bytes[index],
            )
            capacity = _num_held(allocation, names)
            hosts.append(
                HostSpec(name=name, stage_index=index + 1, capacity=capacity, profile=profile)
            )
    links, used = dict(instance.links), {name for stage in allocation.stages for name in stage}
    for host in instance.hosts:
        links[_HOME, host.name] = links[host.name, _HOME] = _FREE
    return Scenario(
        seed=instance.seed,
        batch=BatchConfig(num_data_nodes=1, num_microbatches=model.num_microbatches),
        num_relays=len(hosts) - 1,
        stages=StagesConfig(num_relay_stages=len(allocation.stages)),
        num_iterations=1 + num_batches,
        duration_max_s=1e9,
        profile=shared,
        links=Links(overrides=links),
        churn=tuple(_churn(instance, used, range(2, 2 + num_batches))),
        hosts=tuple(hosts),
        protocol=ProtocolConfig(),
    )


def _churn(instance: Instance, used: Collection[str], iterations: Iterable[int]) -> list[Churn]:
    """Return each batch's losses of the hosts that are used, and their returns with the next."""
    found: list[Churn] = []
    gone: list[str] = []
    for iteration in iterations:
        found += [
            Churn(iteration=iteration, host=name, at_ratio=0.0, returns=True) for name in gone
        ]
        drawn = instance.losses(iteration - 2)
        losses = {name: at_ratio for name, at_ratio in drawn.items() if name in used}
        found += [
            Churn(iteration=iteration, host=name, at_ratio=at_ratio, returns=False)
            for name, at_ratio in sorted(losses.items(), key=lambda pair: pair[1])
        ]
        gone = list(losses)
    return found


def swarm_s(instance: Instance, allocation: Allocation, *, num_batches: int) -> float:
    """Return how long SWARM takes for a batch, as the mean over batches with their losses.

    Args:
        instance: The setting.
        allocation: The hosts and layers of each stage, which SWARM doesn't choose by itself.
        num_batches: Batches over which the mean is taken. Without churn, one is enough.
    """
    num = num_batches if instance.churns else 0
    figures = Retraining(instance, allocation, num_batches=num).run()
    return statistics.mean(figure.duration_s for figure in figures[1 if num else 0 :])


# --- DeDLOC -----------------------------------------------------------------------------------


def dedloc_s(instance: Instance, *, num_batches: int) -> float:
    """Return how long DeDLOC takes for a batch, as the mean over batches with their losses.

    A loss after all microbatches are there costs nothing: the lost host is left out of the average.
    """
    undisturbed_s = _dedloc_batch_s(instance, {})
    if not instance.churns:
        return undisturbed_s
    return statistics.mean(
        _dedloc_batch_s(
            instance, {name: at * undisturbed_s for name, at in instance.losses(batch).items()}
        )
        for batch in range(num_batches)
    )


def _dedloc_batch_s(instance: Instance, gone_s: Mapping[str, float]) -> float:
    """Return the time of a batch.

    Args:
        instance: The setting.
        gone_s: When hosts disconnect.
    """
    compute_s = accumulation_s(instance, gone_s)
    left = [h.name for h in instance.hosts if gone_s.get(h.name, math.inf) > compute_s]
    model = instance.model
    num_layers = 1 if model.shares_layers else model.num_layers
    return compute_s + parts_s(instance, left, num_layers * model.layer_bytes)


def accumulation_s(instance: Instance, gone_s: Mapping[str, float]) -> float:
    """Return when living hosts have computed all microbatches of a batch, each the whole model.

    Args:
        instance: The setting. At least one host stays.
        gone_s: When hosts disconnect. What they have computed is then lost.
    """
    each_s = {
        host.name: instance.model.num_layers * (host.forward_s + host.backward_s)
        for host in instance.hosts
    }
    counts = dict.fromkeys(each_s, 0)
    events = [(time_s, name, True) for name, time_s in gone_s.items()]
    events += [(time_s, name, False) for name, time_s in each_s.items()]
    heapq.heapify(events)
    lost: set[str] = set()
    now_s = 0.0
    while sum(counts.values()) < instance.model.num_microbatches:
        now_s, name, disconnects = heapq.heappop(events)
        if disconnects:
            counts[name] = 0
            lost.add(name)
        elif name not in lost:
            counts[name] += 1
            heapq.heappush(events, (now_s + each_s[name], name, False))
    return now_s
