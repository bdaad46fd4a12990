"""Reading of hosts, links and work from JSON, and of a layout of the servers organisation.

The work of hosts for a run comes from its run file.

docs/research/lab.md describes both files. An error names the file and the place in it.
"""

import difflib
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from decod.config.needs import layer_flops
from decod.config.strict import (
    StrictModel,
    check_json,
    list_model_keys,
    name_of,
    read_json,
    show_value,
)
from decod.errors import ConfigError
from decod.ids import NodeId
from decod.lab.files.work_of_run import training_work, work_of
from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem, TrainingWork
from decod.lab.planner.organisations.run_work import RunProblem
from decod.lab.planner.servers.servers_layout import ServedStage, ServersLayout, broken_rules
from decod.run.run_config import RunConfig

NUM_HOSTS_MAX = 1000
"""The matrices of links have a million entries then."""
NUM_LAYERS_MAX = 1000
NUM_MICROBATCHES_MAX = 100_000

_UNRELIABLE_COPIES = 2
"""A client keeps parameters and the sum of their gradients."""
_RELIABLE_COPIES = 4
"""A server also keeps the two moments of Adam."""

_Id = Annotated[str, Field(min_length=1, max_length=64)]
_Seconds = Annotated[float, Field(ge=0, le=1e6)]
_Bytes = Annotated[float, Field(gt=0, le=1e15)]
_Speed = Annotated[float, Field(gt=0, le=1e12)]


class _WorkEntry(StrictModel):
    layers: Annotated[int, Field(ge=1, le=NUM_LAYERS_MAX)]
    microbatches: Annotated[int, Field(ge=1, le=NUM_MICROBATCHES_MAX)]
    activation_bytes: _Bytes
    layer_bytes: _Bytes
    delay: Annotated[int, Field(ge=0, le=1)] = 1
    head_s: _Seconds = 0.0
    step_s: _Seconds = 0.0
    layer_flops: Annotated[float, Field(gt=0, le=1e24)] | None = None
    """Of one microbatch, forward and backward. Only for hosts with `tflops`."""


class _HostEntry(StrictModel):
    id: _Id
    kind: Literal["data", "reliable", "unreliable"]
    speed: _Speed | None = None
    tflops: _Speed | None = None
    computes: bool = True
    memory_bytes: Annotated[float, Field(ge=0, le=1e18)] | None = None
    capacity: Annotated[int, Field(ge=1, le=10_000)] | None = None
    lost_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.0
    uplink_bytes_per_s: _Bytes | None = None
    downlink_bytes_per_s: _Bytes | None = None


class _LinkValues(StrictModel):
    latency_s: _Seconds
    bandwidth_bytes_per_s: _Bytes


class _LinkEntry(_LinkValues):
    # The file's key, `from`, is a keyword of Python.
    begin: _Id = Field(alias="from")
    end: _Id = Field(alias="to")


class _HostsFile(StrictModel):
    work: _WorkEntry
    hosts: Annotated[list[_HostEntry], Field(max_length=NUM_HOSTS_MAX)]
    default_link: _LinkValues | None = None
    links: list[_LinkEntry] = Field(default_factory=list)


class _OwnWorkEntry(StrictModel):
    """What a file of hosts may say of the work if a run file says the rest."""

    layers: Annotated[int, Field(ge=1, le=NUM_LAYERS_MAX)] | None = None
    microbatches: Annotated[int, Field(ge=1, le=NUM_MICROBATCHES_MAX)] | None = None
    activation_bytes: _Bytes | None = None
    layer_bytes: _Bytes | None = None
    delay: Annotated[int, Field(ge=0, le=1)] | None = None
    layer_flops: Annotated[float, Field(gt=0, le=1e24)] | None = None
    head_s: _Seconds = 0.0
    step_s: _Seconds = 0.0


class _RunHostsFile(StrictModel):
    work: _OwnWorkEntry = Field(default_factory=_OwnWorkEntry)
    hosts: Annotated[list[_HostEntry], Field(max_length=NUM_HOSTS_MAX)]
    default_link: _LinkValues | None = None
    links: list[_LinkEntry] = Field(default_factory=list)


class _StageEntry(StrictModel):
    layers: Annotated[int, Field(ge=1, le=NUM_LAYERS_MAX)]
    frontal: list[_Id]
    backward: list[_Id]
    clients: list[_Id] = Field(default_factory=list)


class _LayoutFile(StrictModel):
    stages: Annotated[list[_StageEntry], Field(min_length=1, max_length=NUM_LAYERS_MAX)]


_KEYS = list_model_keys((_HostsFile, _WorkEntry, _HostEntry, _LinkValues, _LinkEntry))
_RUN_KEYS = list_model_keys((_RunHostsFile, _OwnWorkEntry, _HostEntry, _LinkValues, _LinkEntry))
_LAYOUT_KEYS = list_model_keys((_LayoutFile, _StageEntry))

_Links = dict[tuple[str, str], _LinkValues]


def load_hosts(path: Path) -> TrainingProblem:
    """Return the hosts, links and work that a file describes. `-` stands for the standard input.

    Raises:
        ConfigError: E-CFG-050 unreadable, E-CFG-051 not JSON, E-CFG-052 a key is missing, unknown
            or of a wrong type or size, E-CFG-055 the parts do not make a run.
    """
    file = read_json(path, _HostsFile, _KEYS)
    kinds: dict[str, HostKind] = {}
    for index, entry in enumerate(file.hosts):
        _check_host(path, f"hosts[{index}]", entry, kinds, file.work)
        kinds[entry.id] = HostKind(entry.kind)
    for kind, why in (
        (HostKind.DATA, "microbatches begin and end there"),
        (HostKind.RELIABLE, "each stage needs one that keeps its state"),
    ):
        if kind not in kinds.values():
            what = "data node" if kind == HostKind.DATA else "reliable host"
            _refuse(path, "hosts", f"there is no {what}", why, "add one")
    links = _read_links(path, file, kinds)
    _check_missing(path, kinds, links, file.default_link)
    return _make_problem(file, links)


def load_run_hosts(path: Path, run: RunConfig) -> RunProblem:
    """Return the hosts and links that a file describes, for a run. `-`: the standard input.

    Of the file's `work`, only `head_s` and `step_s` count: the run file says the rest.

    Raises:
        ConfigError: As `load_hosts`. No host need be reliable, and links may be missing.
    """
    return _make_run_problem(path, read_json(path, _RunHostsFile, _RUN_KEYS), run)


def run_hosts_of(place: Path, values: Mapping[str, Any], run: RunConfig) -> RunProblem:
    """Return the same from the answer of a node that runs.

    Args:
        place: The node's folder, for errors.
        values: What the node says, in the form of the file.
        run: The run to plan.

    Raises:
        ConfigError: As `load_run_hosts`.
    """
    file = check_json(str(place), values, _RunHostsFile, _RUN_KEYS)
    return _make_run_problem(place, file, run)


def _make_run_problem(path: Path, file: _RunHostsFile, run: RunConfig) -> RunProblem:
    num_data = sum(entry.kind == "data" for entry in file.hosts)
    if not num_data:
        why = "microbatches begin and end there, or copies of the data lie there"
        _refuse(path, "hosts", "there is no data node", why, "add one")
    work = work_of(run, num_data=num_data, head_s=file.work.head_s, step_s=file.work.step_s)
    sizes = training_work(work, delay=run.servers.delay)
    if work.num_layers > NUM_LAYERS_MAX or work.num_microbatches > NUM_MICROBATCHES_MAX:
        what = f"{work.num_layers} layers and {work.num_microbatches} microbatches"
        why = f"plans end at {NUM_LAYERS_MAX} layers and {NUM_MICROBATCHES_MAX} microbatches"
        _refuse(path, "hosts", f"the run has {what}", why, "plan a smaller run")
    entry = _WorkEntry(
        layers=sizes.num_layers,
        microbatches=sizes.num_microbatches,
        activation_bytes=sizes.activation_bytes,
        layer_bytes=sizes.layer_bytes,
        delay=sizes.delay,
        head_s=sizes.head_s,
        step_s=sizes.step_s,
        layer_flops=layer_flops(run),
    )
    whole = _HostsFile(
        work=entry, hosts=file.hosts, default_link=file.default_link, links=file.links
    )
    kinds: dict[str, HostKind] = {}
    for index, host in enumerate(file.hosts):
        _check_host(path, f"hosts[{index}]", host, kinds, entry)
        kinds[host.id] = HostKind(host.kind)
    if not any(host.speed or host.tflops for host in file.hosts):
        _refuse(path, "hosts", "no host computes", "nobody would train the layers", "add one")
    links = _read_links(path, whole, kinds)
    linked = {begin for begin, _ in links}
    for index, host in enumerate(file.hosts):
        if file.default_link is None and host.id not in linked:
            what = f"host {show_value(host.id)} has no link"
            why, fix = "it can speak to nobody", "add its links, or give a default_link"
            _refuse(path, f"hosts[{index}]", what, why, fix)
    return RunProblem(_make_problem(whole, links), work)


def load_layout(path: Path, problem: TrainingProblem) -> ServersLayout:
    """Return the layout that a file describes. `-` stands for the standard input.

    Raises:
        ConfigError: E-CFG-050 to E-CFG-052 as in `load_hosts`, E-CFG-059 the layout does not fit
            the hosts.
    """
    file = read_json(path, _LayoutFile, _LAYOUT_KEYS)
    layout = ServersLayout(
        tuple(
            ServedStage(
                num_layers=entry.layers,
                frontal=tuple(map(NodeId, entry.frontal)),
                backward=tuple(map(NodeId, entry.backward)),
                clients=tuple(map(NodeId, entry.clients)),
            )
            for entry in file.stages
        )
    )
    for fault in broken_rules(problem, layout):
        place = "stages" if fault.stage_index is None else f"stages[{fault.stage_index}]"
        raise ConfigError(
            f"{name_of(path)}: {place}: {fault.what}",
            why="the layout does not fit the hosts",
            fix="correct it, or leave out --layout to have one found",
            code="E-CFG-059",
        )
    return layout


# --- hosts ----------------------------------------------------------------------------------------


def _check_host(
    path: Path, place: str, entry: _HostEntry, seen: Collection[str], work: _WorkEntry
) -> None:
    if entry.id in seen:
        what = f"{show_value(entry.id)} is taken by another host"
        why, fix = "links name hosts by their ids", "give each host an id of its own"
        _refuse(path, f"{place}.id", what, why, fix)
    if not entry.id.isprintable() or entry.id != entry.id.strip():
        what = f"{show_value(entry.id)} holds characters that do not show"
        _refuse(path, f"{place}.id", what, "ids are printed in tables", "use letters and digits")
    given = [key for key in ("speed", "tflops") if getattr(entry, key) is not None]
    if entry.kind == "data" or not entry.computes:
        if given:
            what = f"host {show_value(entry.id)} has a speed"
            why = "it computes no layers: it is a data node, or computes is false"
            _refuse(path, f"{place}.{given[0]}", what, why, "remove it")
    elif len(given) != 1:
        what = f"host {show_value(entry.id)} has {'two speeds' if given else 'no speed'}"
        fix = "give either speed or tflops"
        if entry.kind == "reliable":
            fix += ", or computes = false"
        _refuse(path, place, what, "layers are shared out by speed", fix)
    if entry.kind == "unreliable" and not entry.computes:
        what = f"unreliable host {show_value(entry.id)} does not compute"
        _refuse(path, f"{place}.computes", what, "it can do nothing else", "remove the host")
    if entry.kind != "unreliable" and entry.lost_ratio:
        what = f"host {show_value(entry.id)} is {entry.kind}, and may be lost"
        why = "others rely on it until the end of the run"
        _refuse(path, f"{place}.lost_ratio", what, why, "remove it, or make the host unreliable")
    if entry.tflops is not None and work.layer_flops is None:
        what, why = "missing", f"host {show_value(entry.id)} gives its speed in tflops"
        _refuse(path, "work.layer_flops", what, why, "add it, or give speeds in layers per second")


def _make_host(entry: _HostEntry, work: _WorkEntry, uplink: float, downlink: float) -> TrainingHost:
    speed = entry.speed or 0.0
    if entry.tflops is not None:
        assert work.layer_flops is not None, "checked before"
        speed = entry.tflops * 1e12 / work.layer_flops
    copies = _RELIABLE_COPIES if entry.kind == "reliable" else _UNRELIABLE_COPIES
    limit = None
    if entry.memory_bytes is not None and entry.kind != "data":
        limit = min(NUM_LAYERS_MAX, math.floor(entry.memory_bytes / (copies * work.layer_bytes)))
    return TrainingHost(
        host_id=NodeId(entry.id),
        kind=HostKind(entry.kind),
        speed_layers_per_s=speed,
        uplink_bytes_per_s=entry.uplink_bytes_per_s or uplink,
        downlink_bytes_per_s=entry.downlink_bytes_per_s or downlink,
        num_layers_max=limit,
        num_microbatches_max=entry.capacity,
        lost_ratio=entry.lost_ratio,
        memory_bytes=None if entry.kind == "data" else entry.memory_bytes,
    )


# --- links ----------------------------------------------------------------------------------------


def _read_links(path: Path, file: _HostsFile, known: Collection[str]) -> _Links:
    """Return the listed links. One holds in both directions, unless the other is listed too."""
    given: _Links = {}
    for index, entry in enumerate(file.links):
        place = f"links[{index}]"
        for key, name in (("from", entry.begin), ("to", entry.end)):
            if name not in known:
                near = difflib.get_close_matches(name, list(known), n=1)
                fix = f"did you mean {show_value(near[0])}?" if near else "add the host"
                what = f"there is no host {show_value(name)}"
                _refuse(path, f"{place}.{key}", what, "a link needs both its ends", fix)
        if entry.begin == entry.end:
            what = f"the link leads from {show_value(entry.begin)} to itself"
            _refuse(path, place, what, "a host needs no link to itself", "remove it")
        if (entry.begin, entry.end) in given:
            what = (
                f"the link {show_value(entry.begin)} > {show_value(entry.end)} stands there twice"
            )
            _refuse(path, place, what, "its values would be in doubt", "remove one of them")
        given[entry.begin, entry.end] = entry
    return {(end, begin): entry for (begin, end), entry in given.items()} | given


def _check_missing(
    path: Path, kinds: dict[str, HostKind], links: _Links, default: _LinkValues | None
) -> None:
    if default is not None:
        return
    for begin, kind in kinds.items():
        for end, other in kinds.items():
            # Unreliable hosts and data nodes speak to reliable hosts only.
            needed = HostKind.RELIABLE in (kind, other) and begin != end
            if needed and (begin, end) not in links:
                what = f"the link {show_value(begin)} > {show_value(end)} is missing"
                why = "a reliable host may have to speak to any other host"
                _refuse(path, "links", what, why, "add it, or give a default_link")


def _make_problem(file: _HostsFile, links: _Links) -> TrainingProblem:
    ids = [entry.id for entry in file.hosts]
    found = [
        [None if begin == end else links.get((begin, end), file.default_link) for end in ids]
        for begin in ids
    ]
    latencies = [[0.0 if link is None else link.latency_s for link in row] for row in found]
    bandwidths = [
        [0.0 if link is None else link.bandwidth_bytes_per_s for link in row] for row in found
    ]
    uplinks = [max(row) for row in bandwidths]
    downlinks = [max(column) for column in zip(*bandwidths, strict=True)]
    hosts = [
        _make_host(entry, file.work, uplink, downlink)
        for entry, uplink, downlink in zip(file.hosts, uplinks, downlinks, strict=True)
    ]
    work = TrainingWork(
        num_layers=file.work.layers,
        num_microbatches=file.work.microbatches,
        activation_bytes=file.work.activation_bytes,
        layer_bytes=file.work.layer_bytes,
        delay=file.work.delay,
        head_s=file.work.head_s,
        step_s=file.work.step_s,
    )
    return TrainingProblem(hosts, latencies, bandwidths, work)


def _refuse(path: Path, place: str, what: str, why: str, fix: str) -> NoReturn:
    raise ConfigError(f"{name_of(path)}: {place}: {what}", why=why, fix=fix, code="E-CFG-055")
