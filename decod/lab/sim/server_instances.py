"""The hosts, links and models of the paper on reliable and unreliable parameter servers.

The paper states too little to derive its absolute times, such as 43.5 minutes for a batch. One
number of each model is therefore fitted: the time of a layer and microbatch on a V100
(`TrainedModel.layer_s`). With it, the fastest baseline takes the paper's time in case 1. Everything
else follows. The choices where the paper is silent:

- A batch has 512 sequences, a microbatch 4. Section 4.3 says "512 tokens"; that counts as 512
  sequences, too.
- ALBERT-xxlarge has 12 layers of width 4,096, which share their parameters, and sequences of 512
  tokens. Llama-33B has 60 layers of width 6,656 and sequences of 2,048 tokens, the length with
  which LLaMA was trained. Embeddings and heads are left out.
- Activations, gradients and parameters have 16 bits, as in mixed precision on a V100. The
  optimizer's state is in host memory (ZeRO-Offload, as in section 4.4), so a device holds the
  parameters of its layers. They may fill 80 % of its 32 GB. The paper's RTX 2080 are slowed V100.
- The backward pass takes twice the time of the forward pass.
- Links within an HPC have 0.1 ms and 2 GB/s. Every pair of hosts has its bandwidth to itself, and
  the same in both directions.
- Case 2: links between HPCs have U(1, 3) GB/s and U(10, 100) ms. The paper says "some nodes".
- Cases 3 and 4: every link that leaves an HPC has U(50, 300) Mbit/s and U(100, 150) ms.
- Case 4: the RTX 2080 are the unreliable ones. Each disconnects with a chance of 90 % in each
  batch, at an instant drawn from the seed, and is back when the next batch begins.
- Figure 2: links are those of case 3. Reliable V100 stand in HPCs of four at most. At a ratio of 30
  %, 11 of 16 hosts are reliable; at 60 %, 6 of 16.
- Figure 4: half of the hosts are reliable V100, half unreliable RTX 2080, at every size. All links
  are slow, and every host stands alone. Each unreliable host draws its chance from 50 to 90 %.
- Figure 5: figure 3 with the measured links isn't in the text. Inside an HPC there is 1 GB/s; from
  cloud to campus 200 Mbit/s and 30 ms; from and to homes U(50, 100) Mbit/s and U(20, 60) ms. RTX
  4090 and RTX 3080 are 2.64 and 0.95 times as fast as a V100, by the peak rates (FP16) that also
  give the paper's 55 % for an RTX 2080. Unreliable hosts disconnect with 50 %. Memory has no limit,
  since the paper offloads.

Source: "reliable/unreliable parameter-server pipelines" (under review at ICLR 2025), section 4.
ALBERT: arXiv:1909.11942, table 1. LLaMA: arXiv:2302.13971, table 2.
"""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from decod.lab.planner.pipelines import PipelineProblem
from decod.sim.kernel import seeded
from decod.sim.network import LinkSpec

_MBIT_BYTES = 125_000.0
_GB = 1e9
_V100_BYTES = 32 * _GB
_USABLE_RATIO = 0.8
"""Share of a device's memory that parameters may take. Activations have the rest."""
_NUM_MICROBATCHES = 512 // 4

RTX_2080 = 1.55
"""Time relative to a V100's. Source: section 4.1, case 3."""
RTX_4090 = 125.0 / 330.0
RTX_3080 = 125.0 / 119.0

INSIDE = LinkSpec(latency_s=0.0001, bandwidth_bytes_per_s=2 * _GB)
"""A link within an HPC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model as stages and links see it."""

    name: str
    num_layers: int
    layer_s: float
    """Forward time of a layer for a microbatch, on a V100. Fitted."""
    activation_bytes: int
    """Of a microbatch between two layers."""
    layer_bytes: int
    """Parameters of a layer; its gradients are as large."""
    shares_layers: bool = False
    """Whether all layers have the same parameters, so that all hosts average the same gradients."""
    backward_ratio: float = 2.0
    num_microbatches: int = _NUM_MICROBATCHES
    """Of a batch."""


ALBERT = TrainedModel(
    name="xxlarge",
    num_layers=12,
    layer_s=9.061,
    activation_bytes=4 * 512 * 4096 * 2,
    layer_bytes=2 * (4 * 4096**2 + 2 * 4096 * 16_384),
    shares_layers=True,
)
LLAMA = TrainedModel(
    name="Llama-33B",
    num_layers=60,
    layer_s=6.864,
    activation_bytes=4 * 2048 * 6656 * 2,
    layer_bytes=2 * (4 * 6656**2 + 3 * 6656 * 17_920),
)
MODELS = (ALBERT, LLAMA)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceHost:
    """A host with one device."""

    name: str
    site: str
    """Hosts of a site are close to one another."""
    forward_s: float
    """Time of one layer and microbatch."""
    backward_s: float
    memory_bytes: float = _V100_BYTES
    disconnect_ratio: float = 0.0
    """Chance to disconnect during a batch."""
    reliable: bool = True


@dataclass(frozen=True, slots=True)
class Allocation:
    """Where the stages of a pipeline with servers are."""

    stages: tuple[tuple[str, ...], ...]
    """Names of the hosts of each stage."""
    num_layers: tuple[int, ...]
    """Of each stage."""


@dataclass(frozen=True, kw_only=True)
class Instance:
    """One setting, drawn from a seed: all systems meet the same hosts, links and losses."""

    name: str
    seed: int
    model: TrainedModel
    hosts: tuple[InstanceHost, ...]
    links: Mapping[tuple[str, str], LinkSpec]
    """Of each ordered pair of hosts."""
    allocation: Allocation | None = None
    """Stages that an experiment prescribes. None: those who need some find them."""

    @property
    def churns(self) -> bool:
        """Whether hosts may disconnect."""
        return any(host.disconnect_ratio for host in self.hosts)

    def losses(self, batch: int) -> dict[str, float]:
        """Return the hosts that disconnect during a batch, and when.

        Instants are shares, 0 to 1, of the time that a batch without losses takes the system.
        """
        found = {}
        for host in self.hosts:
            rng = seeded(self.seed, "loss", host.name, batch)
            strikes, at_ratio = rng.random() < host.disconnect_ratio, rng.random()
            if strikes:
                found[host.name] = at_ratio
        return found

    def num_layers_max(self, host: InstanceHost) -> int:
        """Return the most layers that fit into a host's device."""
        if self.model.shares_layers:
            return self.model.num_layers
        num = int(_USABLE_RATIO * host.memory_bytes / self.model.layer_bytes)
        return min(num, self.model.num_layers)

    @cached_property
    def problem(self) -> PipelineProblem:
        """What planners of rigid pipelines know. Devices are the hosts in their order."""
        names = [host.name for host in self.hosts]
        sites = list(dict.fromkeys(host.site for host in self.hosts))
        here = LinkSpec(0.0, float("inf"))
        rows = [[self.links.get((a, b), here) for b in names] for a in names]
        return PipelineProblem(
            num_layers=self.model.num_layers,
            num_microbatches=self.model.num_microbatches,
            forward_s=tuple(host.forward_s for host in self.hosts),
            backward_s=tuple(host.backward_s for host in self.hosts),
            num_layers_max=tuple(map(self.num_layers_max, self.hosts)),
            latency_s=tuple(tuple(spec.latency_s for spec in row) for row in rows),
            bandwidth_bytes_per_s=tuple(
                tuple(spec.bandwidth_bytes_per_s for spec in row) for row in rows
            ),
            activation_bytes=self.model.activation_bytes,
            layer_bytes=0.0 if self.model.shares_layers else self.model.layer_bytes,
            machines=tuple(
                tuple(index for index, host in enumerate(self.hosts) if host.site == site)
                for site in sites
            ),
        )


def _host(
    model: TrainedModel,
    name: str,
    site: str,
    *,
    slowness: float = 1.0,
    reliable: bool = True,
    disconnect_ratio: float = 0.0,
) -> InstanceHost:
    forward_s = slowness * model.layer_s
    return InstanceHost(
        name=name,
        site=site,
        forward_s=forward_s,
        backward_s=model.backward_ratio * forward_s,
        reliable=reliable,
        disconnect_ratio=disconnect_ratio,
    )


_Draw = Callable[[random.Random], LinkSpec]


def _slow(mbits: tuple[float, float], latency_s: tuple[float, float]) -> _Draw:
    """Return how to draw a link between these bandwidths and latencies."""

    def draw(rng: random.Random) -> LinkSpec:
        rate = rng.uniform(*mbits) * _MBIT_BYTES
        return LinkSpec(rng.uniform(*latency_s), rate)

    return draw


def _links(
    seed: int, hosts: Sequence[InstanceHost], between: _Draw, inside: LinkSpec = INSIDE
) -> dict[tuple[str, str], LinkSpec]:
    """Return links that are the same in both directions."""
    found = {}
    for one, other in itertools.combinations(hosts, 2):
        rng = seeded(seed, "link", one.name, other.name)
        spec = inside if one.site == other.site else between(rng)
        found[one.name, other.name] = found[other.name, one.name] = spec
    return found


_CASE_2 = _slow((8_000.0, 24_000.0), (0.01, 0.1))
_CASE_3 = _slow((50.0, 300.0), (0.1, 0.15))
_FIGURE_4 = _slow((100.0, 300.0), (0.05, 0.15))


def _v100s(model: TrainedModel, num: int, *, each: int = 4) -> list[InstanceHost]:
    """Return reliable hosts in HPCs of `each`."""
    return [_host(model, f"v100-{i + 1}", f"hpc-{i // each + 1}") for i in range(num)]


def _rtx_2080s(model: TrainedModel, num: int, *, disconnect_ratio: float) -> list[InstanceHost]:
    """Return unreliable hosts that stand alone."""
    return [
        _host(
            model,
            f"rtx-{i + 1}",
            f"home-{i + 1}",
            slowness=RTX_2080,
            reliable=False,
            disconnect_ratio=disconnect_ratio,
        )
        for i in range(num)
    ]


def table2(model: TrainedModel, case: int, seed: int) -> Instance:
    """Return a case of table 2, 1 to 4. Cases 3 and 4 of a seed have the same links."""
    assert 1 <= case <= 4
    if case <= 2:
        hosts = _v100s(model, 16, each=16 if case == 1 else 4)
        links = _links(seed, hosts, _CASE_2)
    else:
        ratio = 0.9 if case == 4 else 0.0
        hosts = [*_v100s(model, 8), *_rtx_2080s(model, 8, disconnect_ratio=ratio)]
        links = _links(seed, hosts, _CASE_3)
    name = f"{model.name} case {case}"
    return Instance(name=name, seed=seed, model=model, hosts=tuple(hosts), links=links)


def figure2(unreliable_ratio: float, disconnect_ratio: float, seed: int) -> Instance:
    """Return a setting of figure 2. All settings of a seed have the links of the same names."""
    num = 16 - round(0.625 * 16) if unreliable_ratio == 0.6 else round(16 * (1 - unreliable_ratio))
    hosts = [
        *_v100s(LLAMA, num),
        *_rtx_2080s(LLAMA, 16 - num, disconnect_ratio=disconnect_ratio),
    ]
    name = f"{unreliable_ratio:.0%} unreliable, {disconnect_ratio:.0%} disconnect"
    links = _links(seed, hosts, _CASE_3)
    return Instance(name=name, seed=seed, model=LLAMA, hosts=tuple(hosts), links=links)


def figure4(num_hosts: int, seed: int) -> Instance:
    """Return a setting of figure 4."""
    rng = seeded(seed, "figure 4", num_hosts)
    hosts = _v100s(LLAMA, num_hosts // 2, each=1)
    for host in _rtx_2080s(LLAMA, num_hosts - len(hosts), disconnect_ratio=0.0):
        hosts.append(replace(host, disconnect_ratio=rng.uniform(0.5, 0.9)))
    links = _links(seed, hosts, _FIGURE_4)
    name = f"{num_hosts} hosts"
    return Instance(name=name, seed=seed, model=LLAMA, hosts=tuple(hosts), links=links)


_CLOUD = ("cloud-1", "cloud-2", "cloud-3")
_CAMPUS = ("campus-1", "campus-2", "campus-3")
_RELIABLE = ("home-1", "home-2")
_UNRELIABLE = ("home-3", "home-4", "home-5", "home-6")

FIGURE_5: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "2 stages": (
        (*_CLOUD, "home-1", "home-3", "home-4"),
        (*_CAMPUS, "home-2", "home-5", "home-6"),
    ),
    "3 stages": (
        (*_CLOUD, "home-3"),
        (*_CAMPUS, "home-4"),
        (*_RELIABLE, "home-5", "home-6"),
    ),
    "4 stages": (
        ("cloud-1", "cloud-2", "home-3"),
        ("cloud-3", "campus-1", "home-4"),
        ("campus-2", "campus-3", "home-5"),
        (*_RELIABLE, "home-6"),
    ),
}
"""Stages of figure 5. The paper doesn't say where the fourth unreliable host is."""


def figure5(setting: str, seed: int) -> Instance:
    """Return a setting of figure 5, by its key in `FIGURE_5`. Of others decod plans the stages."""
    model, mbits = LLAMA, (50.0, 100.0)
    hosts = [_host(model, name, "cloud", slowness=RTX_4090) for name in _CLOUD]
    hosts += [_host(model, name, "campus", slowness=RTX_4090) for name in _CAMPUS]
    hosts += [_host(model, name, name, slowness=RTX_3080) for name in _RELIABLE]
    hosts += [
        _host(model, n, n, slowness=RTX_3080, reliable=False, disconnect_ratio=0.5)
        for n in _UNRELIABLE
    ]
    inside = LinkSpec(0.0001, 1 * _GB)
    links = _links(seed, hosts, _slow(mbits, (0.02, 0.06)), inside)
    for one, other in itertools.product(_CLOUD, _CAMPUS):
        links[one, other] = links[other, one] = LinkSpec(0.03, 200 * _MBIT_BYTES)
    large = tuple(replace(host, memory_bytes=1000 * _GB) for host in hosts)
    instance = Instance(name=setting, seed=seed, model=model, hosts=large, links=links)
    if setting not in FIGURE_5:
        return instance
    return replace(instance, allocation=allocate(instance, FIGURE_5[setting]))


def allocate(instance: Instance, stages: Sequence[tuple[str, ...]]) -> Allocation:
    """Return stages with as many layers as fit their hosts' speed."""
    hosts = {host.name: host for host in instance.hosts}
    speeds = [
        sum(1 / (hosts[name].forward_s + hosts[name].backward_s) for name in stage)
        for stage in stages
    ]
    limits = [min(instance.num_layers_max(hosts[name]) for name in stage) for stage in stages]
    numbers = [0] * len(stages)
    for _ in range(instance.model.num_layers):
        open_to = [index for index in range(len(stages)) if numbers[index] < limits[index]]
        assert open_to, f"{instance.name}: {stages} have too little memory"
        best = min(open_to, key=lambda index: (numbers[index] + 1) / speeds[index])
        numbers[best] += 1
    return Allocation(tuple(stages), tuple(numbers))
