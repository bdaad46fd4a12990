"""Secrets and names leave texts in every form in which programs write them; the rest stays."""

import json
from itertools import count

import pytest

from decod.insight.redaction import Redactor, lines_of_keys
from decod.membership.identity import new_identity
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role

KEY = new_identity()
PEM = KEY.to_pem().decode()
(BODY,) = lines_of_keys(PEM)
TOKEN = Token.new(Role.RELAY)
JOIN = str(
    JoinString(root=KEY.public, addresses=("gpu.lab.example:7700", "10.1.2.3:7700"), token=TOKEN)
)
SECRET = JOIN.split("-")[3]
BROKEN = JOIN.replace(SECRET, f"{SECRET[:9]}#{SECRET[9:]}")


def redactor() -> Redactor:
    return Redactor(users=["alice"], home="/home/alice", hosts=["alices-box"], secrets=[BODY])


def redacted(text: str) -> str:
    found = redactor()
    found.learn(text)
    return found.redact(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PEM, "[private key]\n"),
        (json.dumps(PEM), '"[private key]\\n"'),
        (f"cut off: {PEM[:60]}", "cut off: [private key]"),
        (f"{PEM.partition(chr(10))[2]}", "[private key]\n"),
        (f"one line {BODY} of it", "one line [private key] of it"),
        (f"join {JOIN} now", "join [join string] now"),
        (f'"--join={JOIN}"', '"--join=[join string]"'),
        (f"join {JOIN.upper()}", "join [join string]"),
        (f"join {JOIN.partition('@')[0]}", "join [join string]"),
        (f"join {BROKEN.replace('#', ' ')} now", "join [join string] now"),
        (json.dumps(BROKEN.replace("#", "\n> ")), '"[join string]"'),
        (BROKEN.replace("#", "\u200b"), "[join string]"),
        (json.dumps(JOIN.replace("-", "\u2013")), '"[join string]"'),
        (json.dumps([JOIN.partition("@")[0], "--stage"]), '["[join string]", "--stage"]'),
        (f"token {SECRET}.", "token [token]."),
        ("HF_TOKEN=hf_aBcDeFgHiJkLmNoPqRsTuVwX", "HF_TOKEN=[token]"),
        (json.dumps(f"a\n{SECRET}"), '"a\\n[token]"'),
        ("from 203.0.113.7:7700", "from host-1:7700"),
        ("from 203.0.113.7.", "from host-1."),
        ("peer ipv4:203.0.113.7:7700", "peer ipv4:host-1:7700"),
        ("at [2001:db8::7]:7700", "at [host-1]:7700"),
        ("at 2001:db8::7: refused", "at host-1: refused"),
        ("peer ipv6:%5B2001:db8::7%5D:7700", "peer ipv6:[host-1]:7700"),
        ("at fe80::1%eth0 and ::ffff:203.0.113.7", "at host-1 and host-2"),
        ("203.0.113.7, 203.0.113.8, 203.0.113.7", "host-1, host-2, host-1"),
        ("a.lab.example:7700 knows a.lab.example", "host-1:7700 knows host-1"),
        ("a.lab.example:7700 and b.lab.example", "host-1:7700 and host-2"),
        ("leader-pc:7700 is LEADER-PC", "host-1:7700 is host-1"),
        ("see https://intra.lab/x", "see https://host-1/x"),
        ("Alices-Box and alices-box.local", "host-1 and host-2"),
        ("core_alices-box-7.txt", "core_host-1-7.txt"),
        ("/home/alice/run.toml", "~/run.toml"),
        ("/home/bob/run.toml, /Users/eve/x", "/home/user-2/run.toml, /Users/user-3/x"),
        ("/data/alice/decod by Alice", "/data/user-1/decod by user-1"),
    ],
    ids=map(str, count()),  # Some of the texts are random.
)
def test_secrets_and_names_are_removed(text: str, expected: str) -> None:
    assert redacted(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:7700, 0.0.0.0:7700 and [::1]:7700 on localhost:7700",
        '{"time": "2026-11-26T17:25:23.192+00:00", "iteration": "e1:12.1", "loss": 5.571477201}',
        "cuda:0 and cuda:10, decod 0.1.0, torch 2.13.0+cu130, NVIDIA 580.95.05",
        'File "decod/daemon/node.py", line 348, in wait; socket.cpp:460; node.py:348',
        f"node {KEY.node_id} of run {'r' * 26}, token 254bgifq",
        "malice is no name here, and std::vector is no address",
    ],
)
def test_what_names_nobody_stays(text: str) -> None:
    assert redacted(text) == text


def test_pseudonyms_are_the_same_in_all_texts_of_a_report() -> None:
    found = redactor()
    first, second = "a.lab.example:7700 is 203.0.113.7", "203.0.113.8 dials a.lab.example"
    found.learn(second)
    found.learn(first)
    assert found.redact(first) == "host-2:7700 is host-1"
    assert found.redact(second) == "host-3 dials host-2"


def test_a_name_that_json_escapes_is_removed_too() -> None:
    found = Redactor(users=["jörg"], home="/home/jörg", hosts=["jörgs-box"])
    told = found.redact(json.dumps({"path": "/srv/jörg/x", "home": "/home/jörg/y"}))
    assert json.loads(told) == {"path": "/srv/user-1/x", "home": "~/y"}


def test_users_that_are_nobody_stay() -> None:
    found = Redactor(users=["root"], home="/root")
    assert found.redact("the run's root in /root/decod") == "the run's root in ~/decod"


def test_hostile_texts_do_not_hold_it_up() -> None:
    """A quadratic pattern would take hours for these."""
    size = 1 << 20
    for text in ("a" * size, "A1b2" * (size // 4), "a." * size, "1:" * size, "-----BEGIN " * 9999):
        assert redacted(text)
    lines = ("A" * 76 + "\n") * (size // 77)
    assert redacted(lines) == lines
