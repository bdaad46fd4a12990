"""Join strings that a leader refuses, or that lead nowhere: each ends soon, and says what to do."""

import asyncio
import http.server
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from decod.config.needs import stage_needs
from decod.daemon.control import ask
from decod.daemon.member_admission import enter
from decod.membership.identity import load_or_create_identity
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support import misdated
from tests.support.cluster import Cluster, assert_refused, run_decod
from tests.support.members import host_key
from tests.support.runs import make_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

SOON_S = 20.0
"""Longest that a refusal may take on a busy machine. With patience it would be a minute."""


@pytest.fixture(scope="module")
def cluster(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A leader that waits for volunteers. Tests let one in, at most."""
    run = make_run(min_nodes_per_stage=2)
    with Cluster(tmp_path_factory.mktemp("joining"), run, corpus) as living:
        living.start_leader()
        yield living


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


def given(cluster: Cluster) -> JoinString:
    return JoinString.parse(cluster.join_string(cluster.leader) or "")


def new(cluster: Cluster, **asked: object) -> JoinString:
    """Returns a join string with a token of its own."""
    answer = ask(cluster.leader.state_dir, {"command": "token_create", **asked}, timeout_s=10.0)
    return JoinString.parse(str(answer["join_string"]))


def id_of(join: JoinString) -> str:
    assert join.token is not None
    return join.token.id


def expired(cluster: Cluster) -> JoinString:
    join = new(cluster, ttl_s=0.01)

    def ended() -> bool:
        tokens = ask(cluster.leader.state_dir, {"command": "token_list"}, timeout_s=10.0)["tokens"]
        return [each["state"] for each in tokens if each["id"] == id_of(join)] == ["expired"]

    cluster.wait_for(ended, "the token's end")
    return join


def revoked(cluster: Cluster) -> JoinString:
    join = new(cluster)
    ask(cluster.leader.state_dir, {"command": "token_revoke", "id": id_of(join)}, timeout_s=10.0)
    return join


def used_up(cluster: Cluster) -> JoinString:
    join = new(cluster, uses=1)
    folder = cluster.folder / "first.papers"
    asyncio.run(enter(join, Role.RELAY, folder, host_key("the first")))
    return join


def unknown(cluster: Cluster) -> JoinString:
    return replace(given(cluster), token=Token.new(Role.RELAY))


def of_another_root(cluster: Cluster) -> JoinString:
    return replace(given(cluster), root=host_key("another root").public)


def for_members(cluster: Cluster) -> JoinString:
    return replace(given(cluster), token=None)


def for_data_nodes(cluster: Cluster) -> JoinString:
    return new(cluster, role="data")


def at_a_closed_port(cluster: Cluster) -> JoinString:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    return replace(given(cluster), addresses=(address,))


def at_no_host(cluster: Cluster) -> JoinString:
    return replace(given(cluster), addresses=("nowhere.invalid:7700",))


REFUSED = {
    "expired": (expired, 5, ["E-REJ-010", "expired, is used up or was revoked"]),
    "revoked": (revoked, 5, ["E-REJ-010", "expired, is used up or was revoked"]),
    "used up": (used_up, 5, ["E-REJ-010", "expired, is used up or was revoked"]),
    "unknown": (unknown, 5, ["E-REJ-011", "does not know the token in the join string"]),
    "another root": (of_another_root, 5, ["E-REJ-005", "no data node of this run"]),
    "for members": (for_members, 5, ["E-REJ-014", "is not a member"]),
    "for data nodes": (for_data_nodes, 5, ["E-REJ-013", "decod leader RUN.toml --join"]),
    "closed port": (at_a_closed_port, 4, ["E-NET-003", "nobody listens there"]),
    "no host": (at_no_host, 4, ["E-NET-003", "its host name is not known"]),
}


def assert_refused_soon(
    join: JoinString, state_dir: Path, *options: str, exit_code: int, holds: list[str]
) -> None:
    """Checks the command, and that the secret is in nothing that it has written."""
    start_s = time.monotonic()
    place = ["--listen", "127.0.0.1:0", "--state-dir", str(state_dir)]
    result = run_decod("join", str(join), *place, *options)
    assert time.monotonic() - start_s < SOON_S
    assert_refused(result, exit_code=exit_code, holds=[*holds, "Try: "])
    secret = str(join).split("-")[3].encode() if join.token is not None else b"none"
    files = [path for path in state_dir.rglob("*") if path.is_file()]
    written = [result.stdout.encode(), result.stderr.encode(), *(f.read_bytes() for f in files)]
    assert not [text for text in written if secret in text]
    assert not [text for text in written if b"Traceback" in text]


@pytest.mark.parametrize("kind", REFUSED)
def test_a_join_string_that_leads_nowhere_says_why(
    cluster: Cluster, state_dir: Path, kind: str
) -> None:
    make, exit_code, holds = REFUSED[kind]
    assert_refused_soon(make(cluster), state_dir, exit_code=exit_code, holds=holds)


@pytest.mark.parametrize("kind", ["expired", "unknown", "for data nodes", "for members"])
def test_a_dry_run_is_refused_like_the_real_one(
    cluster: Cluster, state_dir: Path, kind: str
) -> None:
    make, exit_code, holds = REFUSED[kind]
    options = ("--dry-run",)
    assert_refused_soon(make(cluster), state_dir, *options, exit_code=exit_code, holds=holds)
    assert not state_dir.exists()


def test_another_service_at_the_address_is_no_node(cluster: Cluster, state_dir: Path) -> None:
    """A web server, say, because of a wrong port."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            join = replace(given(cluster), addresses=(f"127.0.0.1:{server.server_port}",))
            holds = ["E-NET-003", "what listens there is no decod node"]
            assert_refused_soon(join, state_dir, exit_code=4, holds=holds)
        finally:
            server.shutdown()
            thread.join()


def test_a_clock_that_is_a_day_wrong_is_named(
    tmp_path: Path, corpus: Path, state_dir: Path
) -> None:
    with Cluster(tmp_path / "ahead", make_run(min_nodes_per_stage=1), corpus) as ahead:
        ahead.start_leader(program=misdated.DAY_AHEAD)
        holds = ["E-REJ-005", "it is not valid yet by this host's clock", "set this host's clock"]
        assert_refused_soon(given(ahead), state_dir, exit_code=5, holds=holds)


# --- a dry run ------------------------------------------------------------------------------------


def content_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns the time of change and the size of everything in a folder."""
    found = ((path, path.stat()) for path in folder.rglob("*"))
    return {str(path): (stat.st_mtime_ns, stat.st_size) for path, stat in found}


def test_a_dry_run_says_what_joining_takes_and_leaves_no_trace(
    cluster: Cluster, state_dir: Path
) -> None:
    """Not even a token that is good for one node is used up."""
    join = new(cluster, uses=1)
    # The leader has this port, so no other node can open it.
    address = cluster.leader.status()["node"]["address"]
    options = ("--listen", address, "--state-dir", state_dir, "--device", "cpu", "--threads", "3")
    for _ in range(2):
        result = run_decod("join", str(join), *options, "--upload-max", "20Mbit", "--dry-run")
        assert result.returncode == 0, result
        assert not state_dir.exists()
    said, state_bytes = result.stdout, stage_needs(cluster.run, 1).state_bytes
    port = address.rpartition(":")[2]
    for text in (
        "run         test: llama with 53,856 parameters, 2 relay stages",
        f"data nodes that it has certified, such as the one at {address}",
        f"{state_bytes / 2**20:.1f} MiB at the start: weights and optimizer of a stage",
        "no data and no tokenizer, which stay with data nodes, and no code",
        "device      CPU, ",
        "threads     3 for computing, of ",
        f"states of a stage, in {state_dir}, where ",
        f"opens       port {port} of 127.0.0.1, TCP and UDP",
        "upload      at most 20 Mbit/s",
        f"others see  the address {address}",
        "runs code from others",
        "Nothing was written, no port was opened, and no invitation was used.",
    ):
        assert text in said, (text, said)
    tokens = ask(cluster.leader.state_dir, {"command": "token_list"}, timeout_s=10.0)["tokens"]
    assert [each["used"] for each in tokens if each["id"] == id_of(join)] == [0]


def test_a_member_makes_a_dry_run_without_a_token(cluster: Cluster, state_dir: Path) -> None:
    key = load_or_create_identity(state_dir)
    asyncio.run(enter(new(cluster), Role.RELAY, state_dir, key))
    before = content_of(state_dir)
    back = str(replace(given(cluster), token=None))
    result = run_decod("join", back, "--state-dir", state_dir, "--device", "cpu", "--dry-run")
    assert result.returncode == 0, result
    assert result.stderr == "", "no warning: this string holds no secret"
    assert key.name in result.stdout
    assert content_of(state_dir) == before


def test_a_dry_run_asks_for_what_the_run_has(cluster: Cluster, state_dir: Path) -> None:
    options = ("--dry-run", "--stage", "3")
    holds = ["E-REJ-006", "its relay stages are 1 to 2"]
    assert_refused_soon(given(cluster), state_dir, *options, exit_code=5, holds=holds)
    options = ("--dry-run", "--device", "cuda:7")
    holds = ["E-HW-002", "cuda:7"]
    assert_refused_soon(given(cluster), state_dir, *options, exit_code=6, holds=holds)


# --- this host ------------------------------------------------------------------------------------


@contextmanager
def copied(cluster: Cluster, state_dir: Path) -> Iterator[Path]:
    """Yields a copy of the leader's identity key."""
    state_dir.mkdir()
    yield Path(shutil.copy(cluster.leader.state_dir / "identity.key", state_dir))


def test_two_daemons_with_one_identity_are_told(cluster: Cluster, state_dir: Path) -> None:
    with copied(cluster, state_dir):
        holds = ["E-CFG-033", "already", "an empty --state-dir"]
        assert_refused_soon(given(cluster), state_dir, exit_code=3, holds=holds)


@pytest.mark.parametrize("damage", ["cut", "readable by others"])
def test_an_identity_that_is_spoiled_is_named(
    cluster: Cluster, state_dir: Path, damage: str
) -> None:
    with copied(cluster, state_dir) as key:
        if damage == "cut":
            key.write_bytes(key.read_bytes()[:60])
            holds = ["E-CFG-032", str(key), "restore it from a copy"]
        else:
            key.chmod(0o644)
            holds = ["E-CFG-031", f"chmod 600 {key}"]
        assert_refused_soon(given(cluster), state_dir, exit_code=3, holds=holds)


def test_a_state_folder_that_can_not_be_written_is_named(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    state_dir = tmp_path / "file" / "state"
    holds = ["E-CFG-042", str(state_dir), "--state-dir"]
    assert_refused_soon(given(cluster), state_dir, exit_code=3, holds=holds)


# --- in -------------------------------------------------------------------------------------------


def test_a_line_that_a_mail_program_has_spoilt_lets_its_holder_in(cluster: Cluster) -> None:
    text = str(given(cluster))
    spoilt = "> decod join \u201c" + "\n> ".join(text[k : k + 40] for k in range(0, len(text), 40))
    node = cluster.start("newcomer", "join", spoilt.upper().replace("DECOD JOIN", "decod join"))
    cluster.wait_for(lambda: "joins run" in node.stdout, "the newcomer")
    assert cluster.leader.events("member.admitted")[-1]["token"]
