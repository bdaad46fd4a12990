"""The page of real daemons: what it serves, and what it shows when somebody is killed."""

import json
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from decod.exit_codes import ExitCode
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, takes_part
from tests.support.pages import get
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SHOWN_WITHIN_S = 3.0
PAGE = ("--page", "127.0.0.1:0")


def port_of(daemon: Daemon) -> int | None:
    """Return the port of a daemon's page, or None if it serves none yet."""
    served = daemon.events("page.served")
    return int(served[-1]["url"].rstrip("/").rpartition(":")[2]) if served else None


def token_of(daemon: Daemon) -> str:
    return str(daemon.status()["page"].partition("#token=")[2])


def state_of(daemon: Daemon) -> dict[str, Any]:
    port = port_of(daemon)
    assert port is not None
    answer = get(port, "/state.json")
    assert answer.status == 200, answer
    state: dict[str, Any] = answer.json()
    return state


@pytest.fixture(scope="module")
def cluster(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A leader and two relays in each of two stages; the leader and one relay serve a page."""
    run = make_run(min_nodes_per_stage=1)
    protocol = replace(
        run.protocol, heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0, probe_timeout_s=0.5
    )
    folder = tmp_path_factory.mktemp("pages")
    with Cluster(folder, replace(run, protocol=protocol), corpus) as made:
        run_file = made.run_file.read_text(encoding="utf-8")
        made.run_file.write_text(run_file.replace('prompts = ""', 'prompts = "Once "'))
        made.start_leader(*PAGE, "--public-page", "0")
        for stage in (1, 2):
            for index in (0, 1):
                pages = PAGE if (stage, index) == (1, 0) else ()
                made.start_relay(f"relay-{stage}-{index}", "--stage", str(stage), *pages)
        for daemon in made.daemons:
            made.wait_for(partial(takes_part, made, daemon), f"{daemon.name} in the run")
        made.wait_for_iteration(made.leader.iteration + 2)
        yield made


def test_the_leader_shows_the_run(cluster: Cluster) -> None:
    state = state_of(cluster.leader)
    assert state["run"]["state"] in ("training", "aggregating")
    assert state["run"]["leader"] == "leader"
    names = {member["name"]: member["stage"] for member in state["members"]}
    assert names == {"leader": 0} | {f"relay-{s}-{i}": s for s in (1, 2) for i in (0, 1)}
    steps = state["history"]["steps"]
    assert [step[0] for step in steps] == sorted({step[0] for step in steps})
    assert all(step[2] > 0 for step in steps)
    done = [member["microbatches"] for member in state["members"] if member["stage"]]
    assert sum(filter(None, done)) > 0

    def versions() -> set[str]:
        return {member["version"] for member in state_of(cluster.leader)["members"]}

    own = state["node"]["decod_version"]
    cluster.wait_for(lambda: versions() == {own}, "everybody's version")

    def stages_with_flows() -> set[int]:
        now = state_of(cluster.leader)
        return {now["members"][one["from"]]["stage"] for one in now["links"] if one["flows"]}

    cluster.wait_for(lambda: stages_with_flows() == {0, 1, 2}, "flows from end to end")


def test_a_relay_serves_the_same_page_with_its_own_state(cluster: Cluster) -> None:
    relay = cluster.daemons[1]

    def shown() -> bool:
        state = state_of(relay)
        return len(state["members"]) == 5 and any(link["flows"] for link in state["links"])

    cluster.wait_for(shown, "the whole run at a relay")
    state = state_of(relay)
    assert state["node"]["name"] == "relay-1-0"
    assert state["run"]["leader"] == "leader"
    assert state["history"]["steps"]
    port, leaders = port_of(relay), port_of(cluster.leader)
    assert port is not None
    assert leaders is not None
    assert get(port).body == get(leaders).body


def test_it_shows_no_join_string_and_only_reads(cluster: Cluster) -> None:
    port = port_of(cluster.leader)
    assert port is not None
    for path in ("/", "/state.json", "/metrics", "/page.js"):
        answer = get(port, path)
        assert b"decod1-" not in answer.body
        assert "content-security-policy" in answer.headers
        assert get(port, path, headers={"Host": "evil.example"}).status == 421
        assert get(port, path, method="POST").status == 405


def test_a_reader_with_the_token_acts_on_the_node(cluster: Cluster) -> None:
    """`decod status` has the token, and no other node, log or answer of the page."""
    relay, leader = cluster.daemons[1], cluster.leader
    address, _, token = relay.status()["page"].partition("/#token=")
    assert address == f"http://127.0.0.1:{port_of(relay)}"
    assert token.encode() not in (relay.state_dir / "node.log").read_bytes()
    for path in ("/", "/state.json", "/metrics"):
        assert token.encode() not in get(port_of(relay) or 0, path).body
    assert token not in str(leader.status())

    def act(daemon: Daemon, **asked: Any) -> Any:
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {token_of(daemon)}",
        }
        body = json.dumps(asked).encode()
        return get(port_of(daemon) or 0, "/do", method="POST", headers=headers, body=body).json()

    assert act(relay, command="pause")["paused"] is True
    cluster.wait_for(lambda: state_of(relay)["node"]["state"] == "paused", "the pause on the page")
    assert act(relay, command="resume")["paused"] is False
    cluster.wait_for(lambda: state_of(relay)["node"]["state"] != "paused", "its end on the page")
    assert act(relay, command="token_create")["error"]["code"] == "E-CFG-056"
    made = act(leader, command="token_create", uses=3)
    assert made["join_string"].startswith("decod1-")
    assert len(made["qr"]) == len(made["qr"][0])
    values = act(leader, command="set", values={"upload": "100mbit"})["settings"]
    assert {one["name"]: one["value"] for one in values}["upload"].startswith("100")
    act(leader, command="set", values={"upload": "default"})


def test_the_leader_shows_the_run_to_the_world(cluster: Cluster) -> None:
    port = cluster.leader.events("page.published")[-1]["port"]
    answer = get(port, "/state.json", headers={"Host": "run.example.org"})
    assert len(answer.json()["members"]) == 5
    assert cluster.leader.status()["node"]["address"].encode() not in answer.body
    assert get(port, "/do", method="POST").status == 405


def test_what_the_model_writes_is_shown_everywhere(cluster: Cluster) -> None:
    leader, relay = cluster.leader, cluster.daemons[1]
    cluster.wait_for(lambda: leader.status()["texts"]["last"], "a text")
    (last,) = leader.status()["texts"]["last"]
    assert (last["prompt"], bool(last["text"])) == ("Once ", True)
    assert leader.status()["texts"]["share"] <= 0.01
    assert "the model writes: Once " in leader.stderr
    told = [last["iteration"], last["prompt"], last["text"]]
    assert told in state_of(leader)["history"]["texts"]
    cluster.wait_for(lambda: told in state_of(relay)["history"]["texts"], "the text at a relay")


def test_prometheus_finds_the_run(cluster: Cluster) -> None:
    port = port_of(cluster.leader)
    assert port is not None
    text = get(port, "/metrics").body.decode()
    assert "decod_run_training 1.0" in text
    assert re.search(r'decod_members\{stage="2",state="(training|aggregating)"\}', text)
    assert re.search(r"decod_contributed_tokens_total [1-9]", text)


def test_a_chosen_address_that_is_taken_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    taken = f"127.0.0.1:{port_of(cluster.leader)}"
    join = cluster.join_string(cluster.leader) or ""
    folder = ("--state-dir", tmp_path / "state", "--listen", "127.0.0.1:0")
    result = run_decod("join", join, "--page", taken, *folder)
    holds = (taken, "in use", "--no-page")
    assert_refused(result, exit_code=ExitCode.NETWORK, holds=holds)


def test_a_kill_is_shown_within_three_seconds(cluster: Cluster) -> None:
    """Also the work of the one that has gone, and the end of the node that serves a page."""
    victim = cluster.daemons[-1]
    before = state_of(cluster.leader)["history"]

    def shown() -> list[dict[str, Any]]:
        events = state_of(cluster.leader)["history"]["events"][before["num_events"] :]
        return [one for one in events if (one["kind"], one["name"]) == ("lost", victim.name)]

    begin_s = time.monotonic()
    victim.send(signal.SIGKILL)
    cluster.wait_for(shown, "the loss on the page")
    shown_s = time.monotonic() - begin_s
    print(f"a kill is shown after {shown_s:.2f} s")
    assert shown_s < SHOWN_WITHIN_S
    assert shown()[0]["reason"]

    def gone() -> bool:
        state = state_of(cluster.leader)
        former = [one["name"] for one in state["former"]]
        return victim.name in former and len(state["members"]) == 4

    cluster.wait_for(gone, "the view without it")
