"""Hosts and layout files: what is meant is read, and every mistake is named with its place."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.errors import ConfigError
from decod.lab.files.hosts_file import load_hosts, load_layout
from decod.lab.planner.hosts import HostKind, TrainingProblem
from tests.support.json_content import changed, without

HOSTS: dict[str, Any] = {
    "work": {
        "layers": 8,
        "microbatches": 16,
        "activation_bytes": 1_000_000,
        "layer_bytes": 10_000_000,
        "layer_flops": 1e12,
    },
    "hosts": [
        {"id": "d", "kind": "data"},
        {"id": "s1", "kind": "reliable", "computes": False, "uplink_bytes_per_s": 5e6},
        {"id": "s2", "kind": "reliable", "speed": 20, "memory_bytes": 200_000_000},
        {"id": "c", "kind": "unreliable", "tflops": 50, "memory_bytes": 90_000_000, "capacity": 4},
    ],
    "default_link": {"latency_s": 0.02, "bandwidth_bytes_per_s": 1e7},
    "links": [
        {"from": "s1", "to": "s2", "latency_s": 0.001, "bandwidth_bytes_per_s": 1e9},
        {"from": "s1", "to": "c", "latency_s": 0.1, "bandwidth_bytes_per_s": 1e6},
        {"from": "c", "to": "s1", "latency_s": 0.2, "bandwidth_bytes_per_s": 2e6},
    ],
}
LAYOUT: dict[str, Any] = {
    "stages": [
        {"layers": 4, "frontal": ["s1"], "backward": ["s1"], "clients": ["c"]},
        {"layers": 4, "frontal": ["s2"], "backward": ["s2"]},
    ]
}


def _load(folder: Path, content: object) -> TrainingProblem:
    path = folder / "hosts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_hosts(path)


def _error(folder: Path, content: object) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(folder, content)
    return str(caught.value).replace(f"{folder}/", "")


def test_hosts_are_read_as_they_stand(tmp_path: Path) -> None:
    problem = _load(tmp_path, HOSTS)
    data, first, second, client = problem.hosts
    assert [host.kind for host in problem.hosts] == [
        HostKind.DATA,
        HostKind.RELIABLE,
        HostKind.RELIABLE,
        HostKind.UNRELIABLE,
    ]
    assert [host.speed_layers_per_s for host in problem.hosts] == [0, 0, 20, 50]
    # A server keeps four values for each parameter, a client two.
    assert (second.num_layers_max, client.num_layers_max) == (5, 4)
    assert (first.num_layers_max, client.num_microbatches_max) == (None, 4)
    assert (problem.work.num_layers, problem.work.delay, problem.work.head_s) == (8, 1, 0)
    assert data.uplink_bytes_per_s == 1e7


def test_hosts_may_be_written_in_toml(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"

    def table(name: str, values: dict[str, object]) -> str:
        lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
        return "\n".join((name, *lines, ""))

    tables = [table("[work]", HOSTS["work"]), table("[default_link]", HOSTS["default_link"])]
    tables += [table(f"[[{key}]]", each) for key in ("hosts", "links") for each in HOSTS[key]]
    path.write_text("\n".join(tables))
    assert load_hosts(path) == _load(tmp_path, HOSTS)
    for content, expected in (
        ("[work", "E-CFG-051 hosts.toml: not valid TOML"),
        ("work = nan", "E-CFG-052"),
        (f"{tables[0]}\nlyers = 1", "work.lyers: unknown key"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError) as caught:
            load_hosts(path)
        assert expected in str(caught.value).replace(f"{tmp_path}/", "")


def test_a_link_holds_in_both_directions_unless_the_other_is_listed(tmp_path: Path) -> None:
    problem = _load(tmp_path, HOSTS)
    assert problem.latencies_s[1][2] == problem.latencies_s[2][1] == 0.001
    assert (problem.latencies_s[1][3], problem.latencies_s[3][1]) == (0.1, 0.2)
    assert problem.bandwidths_bytes_per_s[0][3] == 1e7
    assert problem.bandwidths_bytes_per_s[0][0] == 0


def test_access_is_as_fast_as_the_best_link_unless_it_is_given(tmp_path: Path) -> None:
    _, first, second, _ = _load(tmp_path, HOSTS).hosts
    assert (first.uplink_bytes_per_s, first.downlink_bytes_per_s) == (5e6, 1e9)
    assert (second.uplink_bytes_per_s, second.downlink_bytes_per_s) == (1e9, 1e9)


def test_without_default_every_link_of_a_reliable_host_is_needed(tmp_path: Path) -> None:
    listed = without(HOSTS, "default_link")
    expected = "E-CFG-055 hosts.json: links: the link 'd' > 's1' is missing"
    assert expected in _error(tmp_path, listed)
    pairs = [("d", "s1"), ("d", "s2"), ("c", "s2")]
    listed["links"] += [
        {"from": begin, "to": end, "latency_s": 0.1, "bandwidth_bytes_per_s": 1e6}
        for begin, end in pairs
    ]
    # A data node and a client need none between them.
    assert _load(tmp_path, listed).bandwidths_bytes_per_s[0][3] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "E-CFG-051 hosts.json:1:1: not valid JSON: the file is empty"),
        ('{"work": NaN}', "E-CFG-051 hosts.json: not valid JSON: NaN is no number of JSON's"),
        ('{"work": 1, "work": 2}', "the key 'work' stands twice in one object"),
        ("[]", "E-CFG-052 hosts.json: is []: it must be an object {}"),
        ("{}", "E-CFG-052 hosts.json: work: missing (1 more like this in the file)"),
    ],
)
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    assert expected in _error(tmp_path, content)


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("work", "layers"), 0, "work.layers: is 0: it must be at least 1"),
        (("work", "layers"), 10**9, "work.layers: is 1000000000: it must be at most 1000"),
        (("work", "delay"), 2, "work.delay: is 2"),
        (("work", "layer_bytes"), 0, "work.layer_bytes: is 0: it must be more than 0"),
        (("work", "lyers"), 1, "work.lyers: unknown key: a key that is not understood"),
        (("hosts", 2, "speed"), -1, "hosts[2].speed: is -1: it must be more than 0"),
        (("hosts", 2, "speed"), "20", "hosts[2].speed: is '20': it must be a number"),
        (("hosts", 2, "speed"), 10**400, "hosts[2].speed: is an integer of 1329 bits"),
        (("hosts", 2, "sped"), 1, "hosts[2].sped: unknown key"),
        (("hosts", 1, "kind"), "server", "hosts[1].kind: is 'server': it must be 'data', "),
        (("hosts", 3, "capacity"), 0, "hosts[3].capacity: is 0"),
        (("hosts", 3, "lost_ratio"), 1, "hosts[3].lost_ratio: is 1: it must be less than 1"),
        (("hosts", 3, "memory_bytes"), -1, "hosts[3].memory_bytes: is -1"),
        (("links", 0, "bandwidth_bytes_per_s"), 0, "is 0: it must be more than 0"),
        (("links", 0, "bandwidth_bytes_per_s"), -5, "links[0].bandwidth_bytes_per_s: is -5"),
        (("links", 0, "latency_s"), -0.1, "links[0].latency_s: is -0.1: it must be at least 0"),
        (("links", 0, "latency_s"), 1e300, "links[0].latency_s: is 1e+300: it must be at most"),
        (("default_link", "bandwidth_bytes_per_s"), 0, "default_link.bandwidth_bytes_per_s: is 0"),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, expected: str
) -> None:
    message = _error(tmp_path, changed(HOSTS, *keys, to=value))
    assert message.startswith("E-CFG-052 hosts.json: ")
    assert expected in message


LINK = {"latency_s": 0.1, "bandwidth_bytes_per_s": 1e6}


@pytest.mark.parametrize(
    ("keys", "value", "expected"),
    [
        (("hosts", 2, "id"), "s1", "hosts[2].id: 's1' is taken by another host"),
        (("hosts", 2, "id"), "s\u202e", "hosts[2].id: 's\\u202e' holds characters that do not"),
        (("hosts", 0, "kind"), "reliable", "hosts[0]: host 'd' has no speed"),
        (("hosts", 1, "lost_ratio"), 0.5, "hosts[1].lost_ratio: host 's1' is reliable, and may"),
        (("hosts", 0, "speed"), 4, "hosts[0].speed: host 'd' has a speed: it computes no layers"),
        (("hosts", 1, "tflops"), 4, "hosts[1].tflops: host 's1' has a speed"),
        (("hosts", 2, "tflops"), 4, "hosts[2]: host 's2' has two speeds"),
        (("hosts", 3), {"id": "c", "kind": "unreliable"}, "hosts[3]: host 'c' has no speed"),
        (
            ("hosts", 3),
            {"id": "c", "kind": "unreliable", "computes": False},
            "hosts[3].computes: unreliable host 'c' does not compute",
        ),
        (("work", "layer_flops"), None, "work.layer_flops: missing: host 'c' gives its speed in"),
        (("hosts",), HOSTS["hosts"][1:], "hosts: there is no data node"),
        (("hosts",), HOSTS["hosts"][:1], "hosts: there is no reliable host"),
        (("links", 0, "to"), "s3", "links[0].to: there is no host 's3'"),
        (("links", 0, "to"), "s1", "links[0]: the link leads from 's1' to itself"),
        (("links", 3), {"from": "s1", "to": "s2", **LINK}, "'s1' > 's2' stands there twice"),
    ],
)
def test_parts_that_make_no_run_are_named(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, expected: str
) -> None:
    message = _error(tmp_path, changed(HOSTS, *keys, to=value))
    assert message.startswith("E-CFG-055 hosts.json: ")
    assert expected in message


def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(ConfigError, match="E-CFG-050 cannot read"):
            load_hosts(path)


@given(st.binary(max_size=200) | st.text(max_size=200))
def test_no_content_ends_in_anything_but_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | str
) -> None:
    path = tmp_path_factory.mktemp("hosts") / "hosts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError):
        load_hosts(path)


def test_a_layout_is_read_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(LAYOUT))
    layout = load_layout(path, _load(tmp_path, HOSTS))
    assert [stage.num_layers for stage in layout.stages] == [4, 4]
    assert [stage.servers for stage in layout.stages] == [("s1",), ("s2",)]
    assert [stage.clients for stage in layout.stages] == [("c",), ()]


@pytest.mark.parametrize(
    ("keys", "value", "code", "expected"),
    [
        (("stages",), [], "052", "stages: is []: it must be a list with at least 1 item"),
        (("stages", 0, "layers"), 0, "052", "stages[0].layers: is 0"),
        (("stages", 0, "client"), [], "052", "stages[0].client: unknown key"),
        (("stages", 0, "layers"), 3, "059", "stages: the stages have 7 layers, not 8"),
        (("stages", 0, "clients"), ["x"], "059", "stages[0]: there is no host 'x'"),
        (("stages", 1, "frontal"), ["s1"], "059", "stages: 's1' stands there twice"),
        (("stages", 1, "frontal"), [], "059", "stages[1]: it has no frontal server"),
        (
            ("stages", 1),
            {"layers": 4, "frontal": [], "backward": [], "clients": ["c"]},
            "059",
            "stages[1]: it has no reliable host",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    tmp_path: Path, keys: tuple[str | int, ...], value: object, code: str, expected: str
) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(changed(LAYOUT, *keys, to=value)))
    with pytest.raises(ConfigError) as caught:
        load_layout(path, _load(tmp_path, HOSTS))
    assert str(caught.value).startswith(f"E-CFG-{code} {path}: ")
    assert expected in str(caught.value)
