"""What `decod doctor` says about node, names, MTU, port, run, reachability and routers."""

import errno
from dataclasses import replace

import pytest

from decod.errors import RejectedError
from decod.exit_codes import ExitCode
from decod.insight.host_checks import Diagnosis, Level, failed_by
from decod.insight.network_checks import (
    ResolvedName,
    RunningNode,
    RunSeen,
    TriedPort,
    TriedReach,
    WayOut,
    check_mtu,
    check_names,
    check_nat,
    check_node,
    check_port,
    check_port_of,
    check_reach,
    check_run,
)

NODE = RunningNode(
    name="brave-otter", state="training", run_name="wiki", run_id="r" * 26, address="h:7700"
)
GOOD = ResolvedName(name="gpu.example.org", addresses=("198.51.100.4",))
SILENT = ResolvedName(name="a.example.org", problem="no answer within 5 s")
ABSENT = ResolvedName(name="b.example.org", problem="Name or service not known", absent=True)
ROUTE = WayOut(target="8.8.8.8", interface="eth0", mtu_bytes=1500, path_mtu_bytes=1500)
PORT = TriedPort(host="0.0.0.0", port=7700)
SEEN = RunSeen(asked="8.8.8.8:7700", name="wiki", duration_s=0.123, observed="9.9.9.9")
REACHED = TriedReach(asked="8.8.8.8:7700", own="9.9.9.9:7700", unreached="")
UNREACHED = replace(REACHED, unreached="nobody listens there")
UNTRIED = replace(REACHED, unreached=None)


def assert_told(told: Diagnosis, level: Level, *texts: str) -> None:
    assert told.level is level, told
    for text in texts:
        assert text in f"{told.found}. Try: {told.remedy}", told


# --- node -----------------------------------------------------------------------------------------


def test_the_node_of_this_host_is_named() -> None:
    assert_told(check_node(None, in_use=False), Level.OK, "none runs")
    told = check_node(NODE, in_use=True)
    assert_told(told, Level.OK, "brave-otter is in run wiki: training")


def test_a_node_that_does_not_answer_is_told() -> None:
    assert_told(check_node(None, in_use=True), Level.WARN, "does not answer", "node.log")


def test_a_node_that_is_out_of_its_run_is_told_with_the_reason() -> None:
    lost = replace(NODE, state="reconnecting", message="nobody listens at h:1")
    assert_told(check_node(lost, in_use=True), Level.WARN, "nobody listens at h:1")
    assert_told(check_node(replace(lost, message=""), in_use=True), Level.WARN, "reconnecting")


# --- names ----------------------------------------------------------------------------------------


def test_names_are_told_with_their_addresses() -> None:
    told = check_names([GOOD], has_addresses=False, own=False)
    assert_told(told, Level.OK, "gpu.example.org is 198.51.100.4")


@pytest.mark.parametrize(
    ("bad", "remedy"), [(SILENT, "/etc/resolv.conf"), (ABSENT, "ask the organiser")]
)
def test_a_run_whose_names_are_all_bad_can_not_be_found(bad: ResolvedName, remedy: str) -> None:
    told = check_names([bad], has_addresses=False, own=False)
    assert_told(told, Level.FAIL, bad.name, bad.problem, remedy)
    assert told.exit_code is ExitCode.NETWORK


def test_a_bad_name_beside_others_is_told() -> None:
    told = check_names([GOOD, SILENT], has_addresses=False, own=False)
    assert_told(told, Level.WARN, "a.example.org: no answer")
    assert_told(check_names([SILENT], has_addresses=True, own=False), Level.WARN)


def test_this_hosts_own_name_is_no_reason_to_fail() -> None:
    assert_told(check_names([ABSENT], has_addresses=False, own=True), Level.WARN, "/etc/hosts")


# --- MTU ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtu_bytes", [1280, 1420, 1500])
def test_usual_packets_pass(mtu_bytes: int) -> None:
    told = check_mtu(replace(ROUTE, mtu_bytes=mtu_bytes, path_mtu_bytes=None))
    assert_told(told, Level.OK, f"{mtu_bytes} bytes at eth0")


def test_a_small_mtu_is_told_of_the_interface_and_of_the_way() -> None:
    assert_told(check_mtu(replace(ROUTE, mtu_bytes=1279)), Level.WARN, "below 1280")
    told = check_mtu(replace(ROUTE, path_mtu_bytes=576))
    assert_told(told, Level.WARN, "1500 bytes at eth0, 576 bytes on the way to 8.8.8.8")


def test_large_packets_are_told_on_the_internet_alone() -> None:
    jumbo = replace(ROUTE, mtu_bytes=9001, path_mtu_bytes=9001)
    assert_told(check_mtu(jumbo), Level.WARN, "ip link set dev eth0 mtu 1500")
    assert_told(check_mtu(replace(jumbo, path_mtu_bytes=1500)), Level.OK)
    assert_told(check_mtu(replace(jumbo, target="10.0.0.1")), Level.OK)
    own = WayOut(target="127.0.0.1", interface="lo", mtu_bytes=65_536, path_mtu_bytes=65_535)
    assert check_mtu(own).found == "65536 bytes at lo"


def test_a_host_without_a_network_is_told() -> None:
    assert_told(check_mtu(None), Level.WARN, "connect this host")


# --- port -----------------------------------------------------------------------------------------


def test_a_free_port_is_named() -> None:
    assert_told(check_port(PORT), Level.OK, "0.0.0.0:7700 is free")
    assert_told(check_port(replace(PORT, port=0)), Level.OK, "a free port of 0.0.0.0")
    assert_told(check_port(replace(PORT, host="::")), Level.OK, "[::]:7700")
    assert_told(check_port_of(NODE), Level.OK, "gives h:7700 to others")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.EADDRINUSE, "ss -lntup"),
        (errno.EADDRNOTAVAIL, "an address of this host"),
        (errno.EACCES, "above 1023"),
        (errno.EIO, "another --listen"),
    ],
)
def test_a_port_that_can_not_be_used_fails(error: int, remedy: str) -> None:
    told = check_port(replace(PORT, error=error, problem="it is so"))
    assert_told(told, Level.FAIL, "can't listen on 0.0.0.0:7700: it is so", remedy)
    assert told.exit_code is ExitCode.NETWORK


# --- run ------------------------------------------------------------------------------------------


def test_a_run_that_answers_is_named() -> None:
    told = check_run(SEEN, None)
    assert_told(told, Level.OK, "wiki: 8.8.8.8:7700 answered in 0.12 s")


def test_a_run_that_was_not_asked_is_told() -> None:
    assert_told(check_run(None, None), Level.WARN, "decod doctor JOINSTRING")
    assert_told(check_run(None, NODE), Level.WARN, "when others have joined")


def test_an_error_of_joining_is_told_with_its_exit_code() -> None:
    told = failed_by("run", RejectedError("no way in", why="it is so", fix="ask", code="E-REJ-010"))
    assert_told(told, Level.FAIL, "E-REJ-010 no way in: it is so. Try: ask")
    assert told.exit_code is ExitCode.REJECTED


# --- reachability and routers ---------------------------------------------------------------------


def test_a_host_that_is_reached_is_fine() -> None:
    assert_told(check_reach(REACHED), Level.OK, "8.8.8.8:7700 reaches this host at 9.9.9.9:7700")


def test_a_host_that_is_not_reached_is_told_why_and_what_to_open() -> None:
    told = check_reach(UNREACHED)
    assert_told(told, Level.WARN, "at 9.9.9.9:7700: nobody listens there", "open TCP and UDP port")


def test_a_host_that_is_no_member_was_not_tried() -> None:
    assert_told(check_reach(UNTRIED), Level.WARN, "not tried at 9.9.9.9:7700", "port 7700")


def test_an_address_of_this_host_means_that_no_router_is_in_between() -> None:
    own = ["127.0.0.1", "fe80::1%eth0", "9.9.9.9"]
    assert_told(check_nat(SEEN, own, REACHED), Level.OK, "none", "9.9.9.9")
    local = replace(SEEN, observed="fe80::1")
    assert_told(check_nat(local, own, None), Level.OK, "none", "fe80::1")


def test_another_address_is_that_of_a_router() -> None:
    told = check_nat(SEEN, ["192.168.1.7"], REACHED)
    assert_told(told, Level.OK, "behind a router", "passes connections on")
    told = check_nat(SEEN, ["192.168.1.7"], UNREACHED)
    assert_told(told, Level.WARN, "behind a router", "--advertise 9.9.9.9:7700")
    told = check_nat(replace(SEEN, observed="2001:db8::9"), ["192.168.1.7"], None)
    assert_told(told, Level.WARN, "--advertise [2001:db8::9]:PORT")


@pytest.mark.parametrize(
    ("observed", "why"),
    [
        ("", "does not say"),
        ("nonsense", "does not say"),
        ("127.0.0.1", "is on this host"),
        ("::1", "is on this host"),
    ],
)
def test_what_can_not_be_told_is_unknown(observed: str, why: str) -> None:
    told = check_nat(replace(SEEN, observed=observed), ["192.168.1.7"], REACHED)
    assert_told(told, Level.WARN, "unknown", why)
