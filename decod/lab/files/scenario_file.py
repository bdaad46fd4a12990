"""Reading of a scenario of `decod lab simulate` from TOML: hosts, links, the sizes of the model.

docs/research/lab.md describes the file. Every host has a name. A link between both hosts comes
first, then a link between a host and the other's location, then a link between both locations, then
the default link.
"""

import difflib
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import Field, ValidationError

from decod.config.strict import (
    MirrorError,
    StrictModel,
    build,
    explain,
    list_model_keys,
    read_file,
    show_value,
)
from decod.errors import ConfigError
from decod.lab.sim.layouts import ROUTING_NAMES, with_routing
from decod.protocol.flows.registry import ROUTINGS
from decod.run.protocol_config import ProtocolConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig
from decod.sim.network import Links, LinkSpec
from decod.sim.profile import ComputeProfile
from decod.sim.scenario import FaultKind, HostFault, HostSpec, Scenario

FILE_SIZE_MAX_BYTES: Final = 1 << 20
NUM_HOSTS_MAX: Final = 1000
"""Bounded because there is a link for every pair of hosts."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

_Seconds = Annotated[float, Field(ge=0, le=86_400)]
_PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
_Bytes = Annotated[int, Field(ge=1, le=1 << 40)]
_Rate = Annotated[float, Field(ge=1e3, le=1e12)]
_Ratio = Annotated[float, Field(ge=0, lt=1)]


class _HostEntry(StrictModel):
    name: str
    role: Literal["data", "relay"]
    stage: Annotated[int, Field(ge=0, le=1000)] = 0
    """Optional for data nodes."""
    capacity: Annotated[int, Field(ge=1, le=10_000)]
    forward_s: _PositiveSeconds
    backward_s: _PositiveSeconds
    head_s: _Seconds = 0.0
    location: str = ""


class _LinkValues(StrictModel):
    latency_s: _Seconds
    bandwidth_bytes_per_s: _Rate


class _LinkEntry(_LinkValues):
    # The file's key, `from`, is a keyword of Python.
    begin: str = Field(alias="from")
    end: str = Field(alias="to")
    both_ways: bool = True


class _FaultEntry(StrictModel):
    kind: Literal["kill", "vanish", "freeze", "restart", "compute", "drain"]
    host: str
    at_s: _Seconds
    duration_s: _Seconds = 10.0


class _ScenarioFile(StrictModel):
    stages: Annotated[int, Field(ge=1, le=1000)]
    iterations: Annotated[int, Field(ge=1, le=100_000)]
    microbatches: Annotated[int, Field(ge=1, le=10_000)]
    activation_bytes: _Bytes
    parameter_bytes: _Bytes = 4_000_000
    optimizer_s: _Seconds = 0.1
    reduce_s: _Seconds = 0.01
    jitter_ratio: _Ratio = 0.0
    routing: str = ""
    """Empty: as `protocol.routing` says."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    duration_max_s: Annotated[float, Field(gt=0, le=1e9)] = 1e6
    link: _LinkValues
    hosts: Annotated[list[_HostEntry], Field(max_length=NUM_HOSTS_MAX)]
    links: list[_LinkEntry] = Field(default_factory=list)
    faults: list[_FaultEntry] = Field(default_factory=list)
    protocol: dict[str, Any] = Field(default_factory=dict)


_KEYS = list_model_keys((_ScenarioFile, _HostEntry, _LinkValues, _LinkEntry, _FaultEntry))

_TOML_WORDS = {"list_type": "an array of tables", "dict_type": "a table of keys"}


@dataclass(frozen=True, slots=True)
class _Place:
    """The file that errors name."""

    path: Path

    def refuse(self, place: str, what: str, why: str, fix: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {place}: {what}", why=why, fix=fix, code="E-CFG-069")


def load_scenario(path: Path) -> Scenario:
    """Return the scenario that a file describes.

    Raises:
        ConfigError: E-CFG-066 unreadable, E-CFG-067 not TOML, E-CFG-068 a key is missing, unknown
            or of a wrong type or size, E-CFG-069 the parts do not make a run.
    """
    try:
        file = _ScenarioFile.model_validate(_parse(path))
    except ValidationError as error:
        raise explain(str(path), error, keys=_KEYS, words=_TOML_WORDS, code="E-CFG-068") from None
    place = _Place(path)
    hosts = _make_hosts(place, file)
    for index, fault in enumerate(file.faults):
        _check_known(place, f"faults[{index}].host", fault.host, [host.name for host in hosts])
    _check_routing(place, "routing", file.routing, ("", *ROUTING_NAMES))
    num_data = sum(host.stage_index == 0 for host in hosts)
    scenario = Scenario(
        seed=file.seed,
        batch=BatchConfig(num_data_nodes=num_data, num_microbatches=file.microbatches),
        num_relays=len(hosts) - num_data,
        stages=StagesConfig(num_relay_stages=file.stages),
        num_iterations=file.iterations,
        join_spread_s=0.0,
        duration_max_s=file.duration_max_s,
        profile=_make_profile(file),
        links=_make_links(place, file),
        faults=tuple(
            HostFault(FaultKind(f.kind), f.host, at_s=f.at_s, duration_s=f.duration_s)
            for f in file.faults
        ),
        protocol=_make_protocol(place, file, hosts),
        hosts=tuple(hosts),
    )
    return with_routing(scenario, file.routing) if file.routing else scenario


def _parse(path: Path) -> dict[str, Any]:
    content = read_file(
        path,
        FILE_SIZE_MAX_BYTES,
        why_large="a scenario has a few kilobytes, so this is likely another file",
        fix="check the path",
        code="E-CFG-066",
    )
    try:
        return tomllib.loads(content.decode("utf-8"))
    except RecursionError:
        why = "brackets are nested too deeply"
    except UnicodeDecodeError as error:
        why = f"byte 0x{content[error.start]:02x} is not UTF-8"
    except ValueError as error:
        # The message ends with line and column.
        why = str(error)[:200]
    raise ConfigError(
        f"{path}: not valid TOML",
        why=why[:1].lower() + why[1:],
        fix="write it as in docs/research/lab.md",
        code="E-CFG-067",
    )


# --- hosts ----------------------------------------------------------------------------------------


def _make_hosts(place: _Place, file: _ScenarioFile) -> list[HostSpec]:
    """Return all hosts, data nodes first."""
    names: set[str] = set()
    for index, entry in enumerate(file.hosts):
        _check_host(place, f"hosts[{index}]", entry, file.stages)
        if entry.name in names:
            place.refuse(
                f"hosts[{index}].name",
                f"{show_value(entry.name)} is taken by another host",
                "links and faults name hosts",
                "give each host a name of its own",
            )
        names.add(entry.name)
    for index, entry in enumerate(file.hosts):
        if entry.location in names:
            place.refuse(
                f"hosts[{index}].location",
                f"{show_value(entry.location)} is a host",
                "a link could mean either",
                "rename one of them",
            )
    stages = Counter(entry.stage for entry in file.hosts)
    for stage_index in range(file.stages + 1):
        if not stages[stage_index]:
            kind = "a data node" if stage_index == 0 else f"a relay of stage {stage_index}"
            place.refuse("hosts", f"{kind} is missing", "the model would be cut in two", "add one")
    specs = [_make_host(file, entry) for entry in file.hosts]
    return sorted(specs, key=lambda spec: spec.stage_index > 0)


def _check_host(place: _Place, where: str, entry: _HostEntry, num_stages: int) -> None:
    for key, value in (("name", entry.name), ("location", entry.location)):
        if not _NAME.match(value) and (key == "name" or value):
            place.refuse(
                f"{where}.{key}",
                f"is {show_value(value)}",
                "it is printed and may stand in other places of the file",
                "give 1 to 64 characters of letters, digits, - and _",
            )
    if (entry.role == "data") != (entry.stage == 0) or entry.stage > num_stages:
        rule = "0" if entry.role == "data" else f"one of 1 to {num_stages}"
        place.refuse(
            f"{where}.stage",
            f"host {entry.name} of role {entry.role} has stage {entry.stage}",
            f"the stage of a {entry.role} node is {rule}",
            "correct its stage or its role",
        )
    if entry.role == "relay" and entry.head_s:
        place.refuse(
            f"{where}.head_s",
            f"host {entry.name} of role relay has a head",
            "the loss is computed at the data nodes",
            "remove it",
        )


def _make_host(file: _ScenarioFile, entry: _HostEntry) -> HostSpec:
    profile = replace(
        _make_profile(file),
        forward_s=entry.forward_s,
        embed_s=entry.forward_s,
        backward_ratio=entry.backward_s / entry.forward_s,
        head_s=entry.head_s,
    )
    return HostSpec(
        name=entry.name, stage_index=entry.stage, capacity=entry.capacity, profile=profile
    )


def _make_profile(file: _ScenarioFile) -> ComputeProfile:
    return ComputeProfile(
        activation_bytes=file.activation_bytes,
        parameter_bytes=file.parameter_bytes,
        optimizer_s=file.optimizer_s,
        reduce_s=file.reduce_s,
        jitter_ratio=file.jitter_ratio,
    )


def _make_protocol(place: _Place, file: _ScenarioFile, hosts: Sequence[HostSpec]) -> ProtocolConfig:
    """Return the protocol's numbers. Unless given, the first iteration waits for enough hosts.

    It waits for all data nodes, and in each stage for as many relays as the smallest stage has.
    """
    sizes = Counter(host.stage_index for host in hosts)
    waits = {
        "min_data_nodes": sizes.pop(0),
        "min_nodes_per_stage": min(sizes.values()),
    }
    try:
        protocol = build(ProtocolConfig, waits | file.protocol)
    except MirrorError as error:
        problem = error.problems[0]
        place.refuse("protocol", problem.what, problem.why, problem.fix)
    except ConfigError as error:
        place.refuse("protocol", error.what, error.why, error.fix)
    _check_routing(place, "protocol.routing", protocol.routing, (*ROUTINGS,))
    return protocol


def _check_routing(place: _Place, where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        place.refuse(
            where,
            f"is {show_value(name)}",
            "there is no such routing",
            f"give one of {', '.join(filter(None, known))}",
        )


# --- links ----------------------------------------------------------------------------------------


def _make_links(place: _Place, file: _ScenarioFile) -> Links:
    """Return the links of all ordered pairs of hosts that differ from the default link."""
    locations = {entry.name: entry.location for entry in file.hosts}
    known = {*locations, *filter(None, locations.values())}
    given: dict[tuple[str, str], LinkSpec] = {}
    for index, entry in enumerate(file.links):
        where = f"links[{index}]"
        _check_known(place, f"{where}.from", entry.begin, known)
        _check_known(place, f"{where}.to", entry.end, known)
        if entry.begin == entry.end and entry.begin in locations:
            place.refuse(where, "leads from a host to itself", "that takes no time", "remove it")
        spec = LinkSpec(entry.latency_s, entry.bandwidth_bytes_per_s)
        pairs = {(entry.begin, entry.end)}
        if entry.both_ways:
            pairs.add((entry.end, entry.begin))
        for pair in pairs:
            if pair in given:
                place.refuse(
                    where,
                    f"the link {pair[0]} > {pair[1]} stands there twice",
                    "which of them holds would be in doubt",
                    "remove one, or write both_ways = false at both",
                )
            given[pair] = spec
    default = LinkSpec(file.link.latency_s, file.link.bandwidth_bytes_per_s)
    return Links(default, _spread(given, locations))


def _spread(
    given: Mapping[tuple[str, str], LinkSpec], locations: Mapping[str, str]
) -> dict[tuple[str, str], LinkSpec]:
    overrides: dict[tuple[str, str], LinkSpec] = {}
    if not given:
        return overrides
    for here, mine in locations.items():
        for there, theirs in locations.items():
            ways = [(here, there), (here, theirs), (mine, there), (mine, theirs)]
            spec = next((given[way] for way in ways if way in given), None)
            if spec is not None and here != there:
                overrides[here, there] = spec
    return overrides


def _check_known(place: _Place, where: str, name: str, known: Sequence[str] | set[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, sorted(known), n=1)
        place.refuse(
            where,
            f"there is no host or location {show_value(name)}",
            "it must be one of those in the file",
            f"did you mean {near[0]}?" if near else "add it, or correct the name",
        )
