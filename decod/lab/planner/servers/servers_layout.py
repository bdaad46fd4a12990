"""A layout: the servers, clients and layers of each stage.

Two forms exist. `ServersLayout` names hosts and is what planners return. A `Draft` holds indexes
into the problem's hosts and is what they compute with: it is hashable, so that the time of a stage
that was seen before is looked up.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decod.ids import NodeId
from decod.lab.planner.hosts import HostKind, TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedStage:
    """A stage's hosts and the number of its layers."""

    num_layers: int
    frontal: tuple[NodeId, ...]
    """Servers that keep the stage's input, in the order of their parts of the microbatches."""
    backward: tuple[NodeId, ...]
    """Servers that keep its output, likewise. The only server of a stage is in both."""
    clients: tuple[NodeId, ...] = ()

    @property
    def servers(self) -> tuple[NodeId, ...]:
        """All servers, each once."""
        return tuple(dict.fromkeys((*self.frontal, *self.backward)))


@dataclass(frozen=True, slots=True)
class ServersLayout:
    """The stages, from the one behind the embedding to the one before the head.

    A host in no stage is idle.
    """

    stages: tuple[ServedStage, ...]


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A `ServedStage` of indexes. Clients are sorted."""

    num_layers: int
    frontal: tuple[int, ...]
    backward: tuple[int, ...]
    clients: tuple[int, ...] = ()

    @property
    def servers(self) -> tuple[int, ...]:
        """All servers, each once."""
        if self.frontal == self.backward:
            return self.frontal
        return self.frontal + self.backward


Draft = tuple[DraftStage, ...]
"""A layout of indexes."""


def to_layout(problem: TrainingProblem, draft: Draft) -> ServersLayout:
    """Return a draft with the ids of its hosts."""

    def named(indexes: Sequence[int]) -> tuple[NodeId, ...]:
        return tuple(problem.hosts[index].host_id for index in indexes)

    return ServersLayout(
        tuple(
            ServedStage(
                num_layers=stage.num_layers,
                frontal=named(stage.frontal),
                backward=named(stage.backward),
                clients=named(stage.clients),
            )
            for stage in draft
        )
    )


def to_draft(problem: TrainingProblem, layout: ServersLayout) -> Draft:
    """Return a layout with the indexes of its hosts. Raise KeyError if a host is unknown."""
    places = problem.positions()

    def numbered(ids: Sequence[NodeId]) -> tuple[int, ...]:
        return tuple(places[host_id] for host_id in ids)

    return tuple(
        DraftStage(
            stage.num_layers,
            numbered(stage.frontal),
            numbered(stage.backward),
            tuple(sorted(numbered(stage.clients))),
        )
        for stage in layout.stages
    )


@dataclass(frozen=True, slots=True)
class LayoutFault:
    """A rule that a layout breaks."""

    stage_index: int | None
    """From 0. None: the fault is in no single stage."""
    what: str


def broken_rules(problem: TrainingProblem, layout: ServersLayout) -> list[LayoutFault]:
    """Return the faults of a layout; an empty list if it is valid.

    Every stage has a layer and a server. Servers are reliable, clients are unreliable, and no host
    is in two places. Several servers share the two duties, and each duty has one of them. A server
    can hold its stage. The layers add up.
    """
    faults: list[LayoutFault] = []
    kinds = {host.host_id: host.kind for host in problem.hosts}
    for index, stage in enumerate(layout.stages):
        faults += [LayoutFault(index, what) for what in _faults_of(problem, kinds, stage)]
    seen = Counter(
        host_id for stage in layout.stages for host_id in (*stage.servers, *stage.clients)
    )
    faults += [
        LayoutFault(None, f"{host_id!r} stands there twice")
        for host_id in seen
        if seen[host_id] > 1
    ]
    total = sum(stage.num_layers for stage in layout.stages)
    if total != problem.work.num_layers:
        faults.append(
            LayoutFault(None, f"the stages have {total} layers, not {problem.work.num_layers}")
        )
    return faults


def _faults_of(
    problem: TrainingProblem, kinds: dict[NodeId, HostKind], stage: ServedStage
) -> list[str]:
    faults = []
    if not stage.servers:
        faults.append("it has no reliable host")
    elif not stage.frontal or not stage.backward:
        faults.append(f"it has no {'frontal' if not stage.frontal else 'backward'} server")
    if stage.num_layers < 1:
        faults.append("it has no layer")
    for duty in (stage.frontal, stage.backward):
        faults += [
            f"{host_id!r} has a duty twice" for host_id in set(duty) if duty.count(host_id) > 1
        ]
    both = set(stage.frontal) & set(stage.backward)
    if both and len(stage.servers) > 1:
        faults.append(f"{min(both)!r} has both duties, which only the single server of a stage has")
    for wanted, ids in (
        (HostKind.RELIABLE, stage.servers),
        (HostKind.UNRELIABLE, stage.clients),
    ):
        faults += [f"there is no host {host_id!r}" for host_id in ids if host_id not in kinds]
        faults += [
            f"{host_id!r} is a host of kind {kinds[host_id]}, not {wanted}"
            for host_id in ids
            if host_id in kinds and kinds[host_id] != wanted
        ]
    limits = {host.host_id: host.num_layers_max for host in problem.hosts}
    for host_id in stage.servers:
        limit = limits.get(host_id)
        if limit is not None and limit < stage.num_layers:
            faults.append(f"{host_id!r} can hold {limit} layers")
    return faults
