"""The page over real HTTP, with a simulated run behind it."""

import asyncio
import json
import math
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decod.config.node_config import NodeConfig
from decod.daemon.host import Host, Leaving
from decod.daemon.page import http_server as http
from decod.daemon.page import page_server as server
from decod.daemon.page.app import POLICY, public_app
from decod.daemon.page.exposition import exposition
from decod.daemon.page.feed import PageFeed, page_state
from decod.daemon.page.http_server import HEAD_SIZE_MAX_BYTES
from decod.errors import NetworkError
from decod.journal.history import STEPS_MAX, RunHistory
from decod.tasks import in_thread
from tests.support.pages import SimulatedRun, get, served, served_app
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
STATIC = sorted(entry.name for entry in (files("decod.daemon.page") / "static").iterdir())
PATHS = ["/", "/state.json", "/metrics", *(f"/{name}" for name in STATIC if name != "index.html")]

CPU_MAX_S = 0.01
"""Processor time of one look, with 200 members: 1 % of the second between two looks."""
SIZE_MAX_BYTES = 128 * 1024
STATIC_SIZE_MAX_BYTES = 300_000


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    made = SimulatedRun(num_stages=3, num_per_stage=3)
    made.see()
    made.train(5)
    return made


@pytest.fixture(scope="module")
def port(run: SimulatedRun) -> Iterator[int]:
    with served(run) as found:
        yield found


@pytest.mark.parametrize("path", PATHS)
def test_each_answer_has_its_type_and_the_security_headers(port: int, path: str) -> None:
    answer = get(port, path)
    assert answer.status == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cross-origin-resource-policy"] == "same-origin"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers
    assert "server" not in answer.headers
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    kinds |= {"json": "application/json"}
    kind = "text/plain" if path == "/metrics" else kinds[path.rpartition(".")[2].strip("/")]
    assert answer.headers["content-type"].startswith(kind)


@pytest.mark.parametrize("path", PATHS)
def test_a_head_request_gets_the_head_alone(port: int, path: str) -> None:
    answer = get(port, path, method="HEAD")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PURGE"])
@pytest.mark.parametrize("path", ["/", "/state.json", "/nothing"])
def test_nothing_can_be_changed(port: int, path: str, method: str) -> None:
    answer = get(port, path, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7780",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "[::1].evil.example",
        "localhost:7780@evil.example",
        "localhost:x",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/state.json", "/metrics"])
def test_a_foreign_name_that_leads_here_gets_nothing(port: int, host: str, path: str) -> None:
    answer = get(port, path, headers={"Host": host})
    assert answer.status == 421
    assert b"--page NAME:PORT" in answer.body
    assert b"tiny-stories" not in answer.body


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:7780", "192.0.2.7:80"]
)
def test_this_host_has_several_names(port: int, host: str) -> None:
    assert get(port, headers={"Host": host}).status == 200


@pytest.mark.parametrize("path", ["/nothing", "/../pyproject.toml", "/static/", "/page.css/"])
def test_there_is_nothing_else(port: int, path: str) -> None:
    answer = get(port, path)
    assert answer.status == 404
    assert answer.headers["content-security-policy"] == POLICY


@pytest.mark.parametrize("path", PATHS)
def test_no_byte_names_an_outside_resource(port: int, path: str) -> None:
    body = get(port, path).body.decode()
    body = re.sub(r"^\s*//.*$|/\*!.*?\*/", "", body, flags=re.M)  # Comments are not loaded.
    addresses = re.findall(r"(?:[a-z]+:)?//[\w.-]+[\w/.-]*", body)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "a name of a language, never loaded"


def test_the_page_is_small(port: int) -> None:
    sizes = [len(get(port, path).body) for path in PATHS if path not in ("/state.json", "/metrics")]
    print(f"the page has {sum(sizes)} bytes in {len(sizes)} files")
    assert sum(sizes) < STATIC_SIZE_MAX_BYTES


def test_the_page_has_nothing_inline_that_its_policy_forbids(port: int) -> None:
    body = get(port).body.decode()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*src=)", body)
    scripts = "".join(get(port, path).body.decode() for path in PATHS if path.endswith(".js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", scripts)


def test_only_what_is_new_is_sent(run: SimulatedRun, port: int) -> None:
    first = get(port, "/state.json").json()["history"]
    query = (
        f"generation={first['generation']}&steps={first['num_steps']}&events={first['num_events']}"
    )
    assert len(first["steps"]) == first["num_steps"] > 0
    again = get(port, f"/state.json?{query}").json()["history"]
    assert (again["steps"], again["events"]) == ([], [])
    run.train(1)
    assert len(get(port, f"/state.json?{query}").json()["history"]["steps"]) == 1


@pytest.mark.parametrize(
    "query", ["steps=-1", "steps=x&events=1e9", "generation=%00&steps=" + "9" * 99]
)
def test_a_senseless_question_gets_everything(port: int, query: str) -> None:
    history = get(port, f"/state.json?{query}").json()["history"]
    assert len(history["steps"]) == history["num_steps"]


def test_secrets_and_addresses_of_others_are_not_shown(port: int) -> None:
    body = get(port, "/state.json").body
    assert b"decod1" not in body
    assert body.count(b"192.0.2.1:7700") == 1, "this node's own"


ADDRESS = "198.51.100.7:7700"


def test_the_public_page_shows_the_run_without_addresses_and_takes_nothing() -> None:
    class Talkative(SimulatedRun):
        async def ask(self) -> dict[str, object]:
            return await super().ask() | {"message": f"nothing has come from {ADDRESS}"}

    run = Talkative(num_stages=3, num_per_stage=3)
    run.see()
    run.train(30)
    run.lose("b0000001".ljust(52, "x"), f"{ADDRESS} does not answer")
    with served(run) as own, served(run, public=True) as port:
        assert ADDRESS.encode() in get(own, "/state.json").body
        answer = get(port, "/state.json", headers={"Host": "run.example.org"})
        assert get(port, headers={"Host": "run.example.org"}).status == 200
        for path in ("/metrics", "/do"):
            assert get(port, path).status == 404
        for path in ("/", "/state.json", "/do"):
            assert get(port, path, method="POST").status == 405
    for secret in (b"decod1", ADDRESS.encode(), b"192.0.2.1", b"swift-eel"):
        assert secret not in answer.body
    shown = answer.json()
    assert shown["public"] is True
    assert {key: value for key, value in shown["node"].items() if value is not None} == {
        "decod_version": "0.1.0"
    }
    assert not any(member["own"] for member in shown["members"])
    assert shown["members"][0]["name"] == "leader"
    assert len(shown["history"]["steps"]) == 30


def test_the_public_page_is_limited_in_rate() -> None:
    now_s = [0.0]
    run = SimulatedRun(num_stages=2, num_per_stage=1)
    limited = public_app(PageFeed(run.ask, run.history, lambda: now_s[0]), lambda: now_s[0])

    def status_of(address: str) -> int:
        statuses = list[int]()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Any:
            return {"type": "http.request"}

        scope = {"type": "http", "method": "GET", "path": "/page.css", "raw_path": b"/page.css"}
        scope |= {"query_string": b"", "headers": [], "client": (address, 1), "root_path": ""}
        asyncio.run(limited(scope, receive, send))
        return statuses[0]

    first = Counter(status_of("192.0.2.1") for _ in range(100))
    assert first == {200: 60, 429: 40}
    assert status_of("192.0.2.2") == 200
    for _ in range(100):
        status_of("::ffff:8.8.8.8")
    assert status_of("::ffff:8.8.8.8") == 429
    assert status_of("::ffff:93.184.216.34") == 200
    now_s[0] = 1.0
    assert Counter(status_of("192.0.2.1") for _ in range(20)) == {200: 4, 429: 16}
    crowd = Counter(status_of(f"192.0.{index // 250}.{index % 250}") for index in range(2000))
    assert 50 < crowd[200] < 200, "all of them together are limited, too"


def test_readers_of_the_public_page_share_answers_while_they_are_fresh() -> None:
    run, now_s = SimulatedRun(num_stages=3, num_per_stage=3), [0.0]
    run.see()
    run.train(5)
    feed = PageFeed(run.ask, run.history, lambda: now_s[0])
    with served_app(public_app(feed, time.monotonic)) as port:
        first = get(port, "/state.json")
        assert first.json()["run"]["iteration"] == 5
        run.train(1)
        assert get(port, "/state.json").body == first.body
        now_s[0] = 1.0
        assert get(port, "/state.json").json()["run"]["iteration"] == 6
        history = first.json()["history"]
        has = "&steps={num_steps}&events={num_events}&rest={rest}".format(**history)
        news = get(port, f"/state.json?generation={history['generation']}{has}").json()["history"]
        assert (len(news["steps"]), news["whole"], news["held_out"]) == (1, False, None)
        all_of_it = get(port, "/state.json").body
        for claim in (f"generation=x{has}", f"generation={history['generation']}&steps=3"):
            assert get(port, f"/state.json?{claim}").body == all_of_it, "nobody has had that"
        plain = get(port, "/state.json", headers={"Accept-Encoding": "identity"})
        assert (plain.status, "--compressed" in plain.body.decode()) == (406, True)


HOSTILE = '</script><img src=x onerror="alert(1)">\x1b[2J\u202e'


def test_a_hostile_name_is_only_text(run: SimulatedRun) -> None:
    node_id = "b0000001".ljust(52, "x")
    hostile = SimulatedRun(num_stages=3, num_per_stage=3, names={node_id: HOSTILE})
    hostile.see()
    hostile.lose(node_id, HOSTILE)
    with served(hostile) as port:
        answer = get(port, "/state.json")
        assert answer.headers["content-type"] == "application/json"
        names = [member["name"] for member in answer.json()["members"]]
        assert '</script><img src=x onerror="alert(1)">?[2J?' in names
        assert b"\x1b" not in answer.body
        assert b"\\u202e" not in answer.body


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"stages": 3, "links": "x", "node": [], "leader": None, "recent": [1]},
        {"stages": [{"nodes": [{"id": ["x"], "flows": {}}, 7]}], "links": [{"from": {}, "to": []}]},
        {"loss": math.nan, "iteration": 10**400, "tokens_per_s": math.inf, "run_name": {"a": 1}},
        {"stages": [{"nodes": [{"id": "a"}, {"id": "a"}]}], "links": [{"from": "a", "to": "b"}]},
    ],
)
def test_whatever_a_leader_tells_there_is_a_page(status: dict[str, object]) -> None:
    state = page_state(status, RunHistory())
    json.dumps(state, allow_nan=False)
    assert exposition(status, RunHistory())


def test_the_page_knows_the_loss_on_held_out_text() -> None:
    last = {"iteration": 100, "loss": 2.5, "perplexity": 12.18}
    state = page_state({"evaluation": {"last": last, "problem": None}}, RunHistory())
    assert state["run"]["held_out_loss"] == 2.5
    assert state["run"]["held_out_perplexity"] == 12.18


def test_the_page_tells_what_this_host_has_done() -> None:
    done = {"num_microbatches": 12_431, "device_s": 7560.0, "sent_bytes": 38 * 10**9}
    shown = page_state({"credit": done}, RunHistory())["node"]["credit"]
    assert shown.startswith("You did 12,431 microbatches, 2.1 device hours, 38 GB up")
    assert page_state({"credit": None}, RunHistory())["node"]["credit"] == ""


def test_connections_that_ask_nothing_lock_nobody_out(
    run: SimulatedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_STUCK_S", 0.2)
    with served(run) as port, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(4 * http.CONNECTIONS_MAX)
        ]
        for number, each in enumerate(silent):
            each.settimeout(20.0)
            if number % 2:
                with suppress(ConnectionError):
                    each.sendall(b"GET / HT")
        for each in silent:
            with suppress(ConnectionError):
                assert each.recv(1) == b"", "it is closed"
        assert get(port, "/state.json").status == 200


def test_a_thousand_slow_connections_keep_no_reader_out(run: SimulatedRun) -> None:
    """They send a byte now and then. Nobody waits here for the time after which they are closed."""
    with served(run) as port, ExitStack() as stack:
        slow = list[socket.socket]()

        def open_some(num: int) -> None:
            for _ in range(num):
                each = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                with suppress(OSError):
                    each.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
                slow.append(each)

        began_s = time.monotonic()
        for _ in range(10):
            open_some(100)
            for each in slow:
                with suppress(OSError):
                    each.sendall(b"x")
            assert get(port, "/state.json").status == 200
        assert len(slow) == 1000
        assert time.monotonic() - began_s < http._STUCK_S


@pytest.mark.parametrize("size_bytes", [HEAD_SIZE_MAX_BYTES + 1, 60_000])
def test_a_head_that_is_too_large_is_refused_also_if_it_comes_at_once(
    port: int, size_bytes: int
) -> None:
    for name, path in (("X-Long", "/"), ("X", f"/{'x' * size_bytes}")):
        value = "x" * size_bytes if path == "/" else "x"
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(10.0)
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{name}: {value}\r\n\r\n"
            connection.sendall(head.encode())
            answer = connection.recv(4096)
        assert answer.split(b" ")[1] in (b"431", b"400"), answer[:100]
    assert get(port, headers={"X-Long": "x" * (HEAD_SIZE_MAX_BYTES - 1000)}).status == 200
    assert get(port, headers={"X-Long": "x" * HEAD_SIZE_MAX_BYTES}).status == 431


def test_a_bug_in_the_page_is_an_answer_and_not_the_end() -> None:
    class Broken(SimulatedRun):
        async def ask(self) -> dict[str, object]:
            raise ValueError("broken")

    with served(Broken(num_stages=2, num_per_stage=1)) as port:
        for _ in range(2):
            answer = get(port, "/state.json")
            assert answer.status == 500
            assert b"ValueError" not in answer.body
            assert answer.headers["content-security-policy"] == POLICY
        assert get(port, "/").status == 200


def test_readers_share_one_look_at_the_node() -> None:
    class Counted(SimulatedRun):
        num_asks = 0

        async def ask(self) -> dict[str, object]:
            self.num_asks += 1
            await asyncio.sleep(0)
            return await SimulatedRun.ask(self)

    run, now_s = Counted(num_stages=2, num_per_stage=1), [0.0]
    feed = PageFeed(run.ask, run.history, lambda: now_s[0])

    async def look() -> None:
        await asyncio.gather(*(feed.since("", 0, 0) for _ in range(10)))

    asyncio.run(look())
    asyncio.run(look())
    assert run.num_asks == 1
    now_s[0] = 0.6
    asyncio.run(look())
    assert run.num_asks == 2


def test_all_other_nodes_together_ask_the_leader_twenty_times_a_second_at_most() -> None:
    class Elsewhere(SimulatedRun):
        num_asks = 0

        async def ask(self) -> dict[str, object]:
            self.num_asks += 1
            status = await SimulatedRun.ask(self)
            return status | {"node": {"id": "another"}}

    run, now_s = Elsewhere(num_stages=5, num_per_stage=50), [0.0]
    feed = PageFeed(run.ask, run.history, lambda: now_s[0])
    for now in range(101):
        now_s[0] = float(now)
        asyncio.run(feed.status())
    assert 201 * (run.num_asks - 1) <= 2100


def test_a_look_at_200_members_is_small_and_costs_less_than_one_percent() -> None:
    run = SimulatedRun(num_stages=5, num_per_stage=50)
    run.see()
    run.train(STEPS_MAX)
    now_s = [0.0]
    feed = PageFeed(run.ask, run.history, lambda: now_s[0])

    async def look(generation: str, num_steps: int, num_events: int) -> bytes:
        now_s[0] += 1.0
        news = await feed.since(generation, num_steps, num_events)
        return json.dumps(news, separators=(",", ":")).encode()

    async def measure() -> tuple[int, int, float]:
        first = await look("", 0, 0)
        history = json.loads(first)["history"]
        seen = history["generation"], history["num_steps"], history["num_events"]
        times_s, size = [], 0
        for _ in range(20):
            begin_s = time.process_time()
            size = len(await look(*seen))
            times_s.append(time.process_time() - begin_s)
        return len(first), size, min(times_s)

    first, size, cpu_s = asyncio.run(measure())
    sizes = f"first look {first / 1024:.0f} KiB, each later one {size / 1024:.0f} KiB"
    print(f"{sizes}, {1e3 * cpu_s:.1f} ms")
    assert first < 2 * SIZE_MAX_BYTES
    assert size < SIZE_MAX_BYTES
    assert cpu_s < CPU_MAX_S


@pytest.mark.parametrize("chosen", [None, 0])
def test_a_daemon_serves_it_on_a_free_port_if_its_own_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: int | None
) -> None:
    config = NodeConfig(state_dir=tmp_path, page_port=chosen)
    log = tmp_path / "node.log"

    async def test() -> None:
        with Host(config, Leaving(print)) as host:
            async with server.page_served(config, host, print):
                await wait_until(lambda: '"page.served"' in log.read_text())
                port = int(re.findall(r"http://127.0.0.1:(\d+)/", log.read_text())[0])
                assert port != taken.getsockname()[1]
                answer = await in_thread(lambda: get(port, "/state.json"))
                assert answer.json()["started"] is False
        with pytest.raises(ConnectionRefusedError):
            get(port)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(server, "PAGE_PORT", taken.getsockname()[1])
        asyncio.run(test())


def test_a_chosen_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    async def test(port: int) -> None:
        config = NodeConfig(state_dir=tmp_path, page_port=port)
        with Host(config, Leaving(print)) as host, pytest.raises(NetworkError, match="E-NET-033"):
            async with server.page_served(config, host, print):
                pass

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(test(taken.getsockname()[1]))


def families(run: SimulatedRun) -> dict[str, str]:
    """Return the type of each metric, by its name without the suffix of counters."""
    with served(run) as port:
        text = get(port, "/metrics").body.decode()
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def test_metrics_are_prometheus_and_name_no_node(run: SimulatedRun) -> None:
    assert families(run)["decod_loss_nats"] == "gauge"
    text = exposition(asyncio.run(run.ask()), run.history).decode()
    assert "decod_iteration " in text
    assert 'decod_members{stage="1",state="training"} 3.0' in text
    assert 'decod_member_events_total{kind="came"}' in text
    assert "relay-1" not in text


def test_each_metric_of_the_dashboard_is_exported(run: SimulatedRun) -> None:
    dashboard = json.loads((ROOT / "docs/grafana-dashboard.json").read_text(encoding="utf-8"))
    targets = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    asked = {name for expr in targets for name in re.findall(r"decod_\w+", expr)}
    text = exposition(asyncio.run(run.ask()), run.history).decode()
    exported = set(re.findall(r"^(decod_\w+)", text, re.MULTILINE))
    assert asked
    assert asked <= exported
