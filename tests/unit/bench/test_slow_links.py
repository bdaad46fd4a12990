"""The figures of the measurement over slow links, and how its hosts are found."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from bench.child import BenchError  # noqa: E402
from bench.hosts import (  # noqa: E402
    LOOPBACK,
    Host,
    Moment,
    OnHosts,
    find_hosts,
    first_address,
    sum_sent,
)
from bench.slow_links import (  # noqa: E402
    compute_busy,
    cores_busy,
    durations,
    home_run,
    overhead_s,
    rows,
    sent_mb,
)
from bench.subject import Sample  # noqa: E402

from decod.compression.plan import Method  # noqa: E402

SAMPLE = Sample(
    subject="home",
    num_threads=1,
    tokens_per_s=2048.0,
    iteration_s=4.0,
    losses={1: 8.0},
    cpu_s={"data": 1.0, "data compute": 2.0, "relay-1-0": 1.0, "relay-1-0 compute": 4.0},
    timing={"data": {"compute_s": 2.0}, "relay-1-0": {"compute_s": 3.0}},
    foreign_cores=0.0,
)


def test_compute_is_busy_for_its_share_of_an_iteration() -> None:
    assert compute_busy(SAMPLE, ["data"]) == 0.5
    assert compute_busy(SAMPLE, ["data", "relay-1-0"]) == 0.625
    assert cores_busy(SAMPLE, 2) == 0.75


def test_a_node_that_told_nothing_is_idle() -> None:
    assert compute_busy(SAMPLE, ["relay-1-0", "relay-1-1"]) == 0.375


def test_what_an_iteration_takes_is_split_into_its_microbatches_and_the_rest() -> None:
    none_s, each_s = overhead_s((8, 5.0), (32, 14.6))
    assert each_s == pytest.approx(0.4)
    assert none_s == pytest.approx(1.8)


def test_moments_give_durations_and_traffic_by_iteration() -> None:
    first = Moment(3, 10.0, None, None, {"data": 1_000_000})
    moments = [first, replace(first, iteration=4, instant_s=12.5)]
    moments.append(Moment(5, 14.0, 1.0, 5.0, {"data": 9_000_000, "relay-1-0": 7}))
    assert durations(moments) == [2.5, 1.5]
    assert sent_mb(moments[0], moments[-1]) == {"data": 4.0}


def test_hosts_are_namespaces_with_addresses() -> None:
    hosts = find_hosts("home-1=10.0.0.1, home-2=10.0.0.2")
    assert hosts == [Host("10.0.0.1", "home-1"), Host("10.0.0.2", "home-2")]
    assert hosts[1].place.prefix == ("ip", "netns", "exec", "home-2")
    assert LOOPBACK.place.prefix == ()
    assert LOOPBACK.listen == "127.0.0.1:0"


def test_an_address_is_the_first_that_others_can_reach() -> None:
    local = {"family": "inet", "scope": "host", "local": "127.0.0.1"}
    reachable = {"family": "inet", "scope": "global", "local": "10.0.0.7"}
    assert first_address([{"addr_info": [local]}, {"addr_info": [reachable]}]) == "10.0.0.7"
    with pytest.raises(BenchError, match="no address"):
        first_address([{"addr_info": [local]}, {}])


def test_loopback_is_not_counted_as_traffic() -> None:
    links = [
        {"flags": ["LOOPBACK", "UP"], "stats64": {"tx": {"bytes": 1000}}},
        {"flags": ["BROADCAST", "UP"], "stats64": {"tx": {"bytes": 70}}},
    ]
    assert sum_sent(links) == 70


def test_daemons_are_named_by_stage() -> None:
    names = OnHosts("home", [LOOPBACK] * 5, num_members=2).nodes()
    assert names == ["data", "relay-1-0", "relay-1-1", "relay-2-0", "relay-2-1"]


def test_every_row_of_the_table_is_a_run() -> None:
    table = {row.name: row for row in rows(every=10, rank=256, num_phases=2)}
    runs = {name: row.run(index) for index, (name, row) in enumerate(table.items())}
    assert runs["DiLoCoX"].sync.overlap
    assert not runs["without overlap"].sync.overlap
    assert runs["without compression"].sync.compression is Method.NONE
    assert runs["OpenDiLoCo"].sync.every == 40
    assert runs["all-reduce"].sync.every == 1
    for name, run in runs.items():
        # No process may leave during the last measured iteration.
        assert run.num_iterations == table[name].num_warmup + table[name].num_measured + 1


def test_both_nets_get_the_same_run_between_homes() -> None:
    run = home_run(num_microbatches=16, every=10, rank=32, num_iterations=14)
    assert run.batch.num_microbatches == 16
    assert run.num_iterations == 14
    assert run.sync.overlap
