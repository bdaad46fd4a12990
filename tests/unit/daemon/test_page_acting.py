"""Requests that act on a node by its page: who may send them, and what they may ask."""

import json
from typing import Any

import pytest

from decod.daemon.page.acting import BODY_SIZE_MAX_BYTES, FIELDS, PATH, Acting
from tests.support.pages import Answer, SimulatedRun, get, served

KIND = "application/json"


def post(port: int, body: bytes, **headers: str) -> Answer:
    return get(port, PATH, method="POST", headers=headers, body=body)


def asked(command: str, **fields: Any) -> bytes:
    return json.dumps({"command": command, **fields}).encode()


def headers_of(acting: Acting) -> dict[str, str]:
    return {"Authorization": f"Bearer {acting.token}", "Content-Type": KIND}


def test_who_has_the_token_acts() -> None:
    run = SimulatedRun(num_stages=2, num_per_stage=1, answers={"pause": {"paused": True}})
    acting = Acting(run.answer)
    with served(run, acting) as port:
        answer = post(port, asked("pause", free_device=True), **headers_of(acting))
        origin = {"Origin": f"http://127.0.0.1:{port}", "Sec-Fetch-Site": "same-origin"}
        post(port, asked("resume"), **headers_of(acting), **origin)
        assert get(port, "/state.json").json()["acts"] is True
    assert (answer.status, answer.json()) == (200, {"paused": True})
    assert run.asked == [{"command": "pause", "free_device": True}, {"command": "resume"}]


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer " + "a" * 32}, 401),
        ({"Authorization": "Bearer \xe9"}, 401),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "evil.example"}, 421),
    ],
)
def test_whoever_else_asks_is_refused(changed: dict[str, str], status: int) -> None:
    run = SimulatedRun(num_stages=2, num_per_stage=1)
    acting = Acting(run.answer)
    with served(run, acting) as port:
        answer = post(port, asked("drain"), **{**headers_of(acting), **changed})
    assert answer.status == status
    assert not run.asked
    assert acting.token.encode() not in answer.body


@pytest.mark.parametrize("client", [("192.0.2.1", 5), ("2001:db8::1", 5), ("x", 5), None])
def test_only_this_host_acts(client: tuple[str, int] | None) -> None:
    acting = Acting(SimulatedRun(2, 1).answer)
    right = [(name.lower().encode(), value.encode()) for name, value in headers_of(acting).items()]
    refusal = acting.refusal({"type": "http", "client": client, "headers": right})
    assert refusal is not None
    assert refusal[0] == 403


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[]",
        b"\xff",
        b"[" * 4000,
        asked("status"),
        asked("export", path="/etc/x"),
        asked("drain", wait=True),
        asked("token_create", role="data"),
        asked("pause", free_device=True, more="x" * BODY_SIZE_MAX_BYTES),
        json.dumps({"command": ["pause"]}).encode(),
    ],
)
def test_the_page_asks_only_what_it_may(body: bytes) -> None:
    run = SimulatedRun(num_stages=2, num_per_stage=1)
    acting = Acting(run.answer)
    with served(run, acting) as port:
        answer = post(port, body, **headers_of(acting))
    assert answer.status == 400
    assert answer.json()["error"]["fix"]
    assert not run.asked


def test_an_error_of_the_node_is_its_answer() -> None:
    error = {"what": "no", "why": "so", "fix": "go", "code": "E-REJ-007"}
    run = SimulatedRun(num_stages=2, num_per_stage=1, answers={"pause": {"error": error}})
    acting = Acting(run.answer)
    with served(run, acting) as port:
        answer = post(port, asked("pause"), **headers_of(acting))
    assert (answer.status, answer.json()["error"]) == (409, error)


def test_a_join_string_comes_with_its_qr_code() -> None:
    made = {"join_string": "decod1-" + "a" * 300, "command": "decod join"}
    run = SimulatedRun(num_stages=2, num_per_stage=1, answers={"token_create": made})
    acting = Acting(run.answer)
    with served(run, acting) as port:
        rows = post(port, asked("token_create", uses=2), **headers_of(acting)).json()["qr"]
    assert len(rows) == len(rows[0]) > 50
    assert rows[0].startswith("1111111")


def test_a_page_that_is_only_read_takes_no_request() -> None:
    run = SimulatedRun(num_stages=2, num_per_stage=1)
    with served(run) as port:
        assert post(port, asked("pause"), **{"Content-Type": KIND}).status == 405
        assert get(port, "/state.json").json()["acts"] is False
    with served(run, Acting(run.answer)) as port:
        assert get(port, "/", method="POST").status == 405
        assert get(port, PATH).status == 405


def test_each_token_is_new() -> None:
    answer = SimulatedRun(2, 1).answer
    assert Acting(answer).token != Acting(answer).token
    assert len(Acting(answer).token) == 32
    assert "status" not in FIELDS
