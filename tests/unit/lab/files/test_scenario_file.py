"""Scenario files: what they mean, and what is said about those that mean nothing."""

from pathlib import Path

import pytest

from decod.errors import ConfigError
from decod.lab.files.scenario_file import load_scenario
from decod.sim.network import LinkSpec
from decod.sim.scenario import FaultKind, Scenario

ROOT = Path(__file__).resolve().parents[4]

PLAIN = """
stages = 1
iterations = 2
microbatches = 3
activation_bytes = 1_000_000
[link]
latency_s = 0.1
bandwidth_bytes_per_s = 1e6
[[hosts]]
name = "relay"
role = "relay"
stage = 1
capacity = 2
forward_s = 0.5
backward_s = 0.75
location = "north"
[[hosts]]
name = "data"
role = "data"
capacity = 3
forward_s = 1
backward_s = 2
head_s = 0.25
location = "south"
"""

LINK = """
[[links]]
from = "{begin}"
to = "{end}"
latency_s = {latency}
bandwidth_bytes_per_s = 5000
"""


def load(tmp_path: Path, text: str) -> Scenario:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return load_scenario(path)


def test_hosts_are_as_described_data_nodes_first(tmp_path: Path) -> None:
    scenario = load(tmp_path, PLAIN)
    data, relay = scenario.hosts
    assert (data.name, data.stage_index, data.capacity) == ("data", 0, 3)
    assert (relay.name, relay.stage_index, relay.capacity) == ("relay", 1, 2)
    assert relay.profile.pass_s(data=False) == pytest.approx((0.5 + 0.75) / 2)
    assert data.profile.pass_s(data=True) == pytest.approx((1 + 2 + 0.25) / 2)
    assert (
        scenario.batch.num_data_nodes,
        scenario.num_relays,
        scenario.stages.num_relay_stages,
    ) == (1, 1, 1)
    assert (scenario.batch.num_microbatches, scenario.num_iterations) == (3, 2)
    assert scenario.routing == "flow"


def test_the_more_a_link_names_the_more_it_counts(tmp_path: Path) -> None:
    def latency_s(*links: tuple[str, str]) -> float:
        text = PLAIN + "".join(
            LINK.format(begin=begin, end=end, latency=index + 1)
            for index, (begin, end) in enumerate(links)
        )
        return load(tmp_path, text).links.between("data", "relay", seed=0).latency_s

    assert latency_s() == 0.1
    assert latency_s(("south", "north")) == 1
    assert latency_s(("north", "south")) == 1, "it holds both ways"
    assert latency_s(("south", "relay"), ("south", "north")) == 1
    assert latency_s(("south", "north"), ("data", "north"), ("south", "relay")) == 2
    assert latency_s(("data", "relay"), ("data", "north")) == 1


def test_a_link_may_hold_one_way_only(tmp_path: Path) -> None:
    one_way = LINK.format(begin="data", end="relay", latency=3) + "both_ways = false\n"
    links = load(tmp_path, PLAIN + one_way).links
    assert links.between("data", "relay", seed=0) == LinkSpec(3, 5000)
    assert links.between("relay", "data", seed=0) == LinkSpec(0.1, 1e6)


def test_the_protocol_can_be_tuned_and_waits_for_all_hosts(tmp_path: Path) -> None:
    assert load(tmp_path, PLAIN).protocol.min_data_nodes == 1
    tuned = load(tmp_path, f"{PLAIN}[protocol]\nanswer_timeout_s = 2\nmin_nodes_per_stage = 1\n")
    assert tuned.protocol.answer_timeout_s == 2


def test_faults_strike_when_the_file_says(tmp_path: Path) -> None:
    text = f'{PLAIN}[[faults]]\nkind = "freeze"\nhost = "relay"\nat_s = 4\nduration_s = 2.5\n'
    (fault,) = load(tmp_path, text).faults
    assert (fault.kind, fault.host) == (FaultKind.FREEZE, "relay")
    assert (fault.at_s, fault.duration_s) == (4, 2.5)


def test_the_example_is_a_scenario() -> None:
    scenario = load_scenario(ROOT / "docs/scenario.toml")
    assert len(scenario.hosts) == 9
    assert scenario.links.between("porto", "vienna", seed=0).bandwidth_bytes_per_s == 2.5e6
    assert scenario.links.between("vienna", "porto", seed=0).bandwidth_bytes_per_s == 62.5e6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stages = 1", "", "E-CFG-068 .*: stages: missing"),
        ("stages = 1", "stages = 0", "E-CFG-068 .*: stages: is 0"),
        ("stages = 1", 'stages = "1"', "E-CFG-068 .*stages: is '1': it must be an integer"),
        ("stages = 1", "stages = true", "E-CFG-068 .*stages: is True"),
        ("stages = 1", "stages = 1\nspeed = 2", "E-CFG-068 .*: speed: unknown key"),
        ("stages = 1", "stages = 1\nsteges = 2", "did you mean stages"),
        ("stages = 1", "stages = 2", "E-CFG-069 .*: hosts: a relay of stage 2 is missing"),
        ("stages = 1", "stages = ", "E-CFG-067 .*not valid TOML"),
        ("stages = 1", "stages = 1\nstages = 1", "E-CFG-067 .*not valid TOML"),
        ("stages = 1", 'stages = 1\nrouting = "best"', "E-CFG-069 .*: routing: is 'best'"),
        ("stages = 1", "stages = 1\nlinks = 4", "links: is 4: it must be an array of tables"),
        ("latency_s = 0.1", "latency_s = -1", r"E-CFG-068 .*: link\.latency_s: is -1"),
        ("latency_s = 0.1", "latency_s = nan", r"E-CFG-068 .*: link\.latency_s: is nan"),
        ("1e6", "0", r"link\.bandwidth_bytes_per_s: is 0"),
        ("capacity = 2", "capacity = 0", r"hosts\[0\]\.capacity: is 0"),
        ("forward_s = 0.5", "forward_s = 0", r"hosts\[0\]\.forward_s: is 0"),
        ("stage = 1\n", "stage = 2\n", r"E-CFG-069 .*hosts\[0\]\.stage: .* one of 1 to 1"),
        ('role = "data"', 'role = "data"\nstage = 1', r"hosts\[1\]\.stage: .* is 0\."),
        ('role = "relay"', 'role = "relay"\nhead_s = 1', r"hosts\[0\]\.head_s: .*has a head"),
        ('role = "data"', 'role = "reader"', r"E-CFG-068 .*hosts\[1\]\.role: is 'reader'"),
        ('name = "data"', 'name = "relay"', r"hosts\[1\]\.name: 'relay' is taken"),
        ('name = "data"', 'name = "a b"', r"hosts\[1\]\.name: is 'a b'"),
        ('"south"', '"relay"', r"hosts\[1\]\.location: 'relay' is a host"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = PLAIN.replace(old, new, 1)
    assert text != PLAIN
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (LINK.format(begin="data", end="nort", latency=1), r"links\[0\]\.to: .*did you mean north"),
        (LINK.format(begin="data", end="data", latency=1), "leads from a host to itself"),
        (
            LINK.format(begin="data", end="relay", latency=1)
            + LINK.format(begin="relay", end="data", latency=1),
            r"links\[1\]: the link \w+ > \w+ stands there twice",
        ),
        (
            '[[faults]]\nkind = "kill"\nhost = "north"\nat_s = 1\n',
            r"faults\[0\]\.host: there is no host",
        ),
        ('[[faults]]\nkind = "burn"\nhost = "data"\nat_s = 1\n', r"faults\[0\]\.kind: is 'burn'"),
        ("[protocol]\nanswer_timeout_s = 0\n", "protocol: .*answer_timeout_s is 0"),
        ("[protocol]\nanswer_timeouts = 1\n", "protocol: unknown key answer_timeouts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, added: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, PLAIN + added)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="E-CFG-066 cannot read"):
        load_scenario(tmp_path / "missing.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match=r"E-CFG-066 .*larger"):
        load_scenario(tmp_path / "large.toml")
    (tmp_path / "odd.toml").write_bytes(b"# \xff")
    with pytest.raises(ConfigError, match=r"E-CFG-067 .*0xff is not UTF-8"):
        load_scenario(tmp_path / "odd.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="E-CFG-067"):
        load_scenario(tmp_path / "deep.toml")
