"""What operators get wrong and what strangers send: refused with a reason, and training goes on."""

import asyncio
import os
import random
import shutil
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from decod.ids import Iteration, NodeId, RunId
from decod.membership.papers import Membership
from decod.net.channel import (
    CONTROL_SERVICE,
    ENROLL_SERVICE,
    STATE_SERVICE,
    run_metadata,
)
from decod.net.join_string import JoinString
from decod.protocol.core.messages import Heartbeat, Leave, Message, Suspect
from decod.protocol.core.view import Role
from decod.wire import codec
from decod.wire.v1 import control_pb2
from tests.support import flooding, unhurried
from tests.support.cluster import Cluster, Daemon, assert_refused, run_decod, stage_nodes
from tests.support.members import channel_to, host_key
from tests.support.runs import make_run
from tests.support.sending import sending_to

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A run that trains without end and without haste, besides what the tests try on it."""
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path_factory.mktemp("training"), run, corpus) as living:
        living.start_leader(program=unhurried.PROGRAM)
        living.start_relays(1)
        living.wait_for_iteration(1)
        yield living


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """Options that put a node on a free port and into a folder of its own."""
    return ["--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"), "--threads", "1"]


def address_of(daemon: Daemon) -> tuple[str, int]:
    host, _, port = daemon.status()["node"]["address"].rpartition(":")
    return host, int(port)


def join_string(cluster: Cluster) -> str:
    found = cluster.join_string(cluster.leader)
    assert found is not None
    return found


def wait_for_counters(
    cluster: Cluster, daemon: Daemon, before: dict[str, int], prefix: str, *, at_least: int
) -> None:
    def grown() -> bool:
        counters: dict[str, int] = daemon.status()["counters"]
        return at_least <= sum(
            count - before.get(name, 0)
            for name, count in counters.items()
            if name.startswith(prefix)
        )

    cluster.wait_for(grown, f"{at_least} new counts of {prefix}")


def assert_unimpressed(cluster: Cluster) -> None:
    """Checks that all live and that training goes on."""
    for daemon in cluster.daemons:
        daemon.refuse_death()
    cluster.wait_for_iteration(cluster.leader.iteration + 2)
    assert not cluster.leader.events("member.lost")
    assert not cluster.tracebacks()


# --- what an operator gets wrong ------------------------------------------------------------------


@pytest.mark.parametrize("command", ["leader", "join"])
def test_a_port_in_use_is_named(training: Cluster, place: list[str], command: str) -> None:
    host, port = address_of(training.leader)
    what = str(training.run_file) if command == "leader" else join_string(training)
    place[1] = f"{host}:{port}"
    result = run_decod(command, what, *place)
    assert_refused(result, exit_code=4, holds=["E-NET-002", str(port)])


@pytest.mark.parametrize("kept", [0, 1, 20, 98, 99, 100])
def test_a_join_string_cut_short_is_refused(training: Cluster, place: list[str], kept: int) -> None:
    result = run_decod("join", join_string(training)[:kept], *place)
    assert_refused(result, exit_code=4, holds=["join string"])


def test_a_join_string_of_another_run_is_refused(training: Cluster, place: list[str]) -> None:
    """All is well-formed, but who answers at the address can't prove that it is meant."""
    true = JoinString.parse(join_string(training))
    foreign = replace(true, root=host_key("another root").public)
    result = run_decod("join", str(foreign), *place)
    assert_refused(result, exit_code=5, holds=["E-REJ-005", "no data node of this run"])


def test_a_join_string_is_good_for_its_own_command_only(
    training: Cluster, place: list[str]
) -> None:
    arguments = (training.run_file, "--join", join_string(training))
    result = run_decod("leader", *arguments, *place)
    assert_refused(result, exit_code=5, holds=["E-REJ-013", "`decod join`"])


def test_a_join_string_without_a_token_leads_only_members_back(
    training: Cluster, place: list[str]
) -> None:
    back = replace(JoinString.parse(join_string(training)), token=None)
    result = run_decod("join", str(back), *place)
    assert_refused(result, exit_code=5, holds=["E-REJ-014", "is not a member"])


def test_nobody_at_the_address_is_a_network_error(training: Cluster, place: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        head = join_string(training).partition("@")[0]
        text = f"{head}@127.0.0.1:{closed.getsockname()[1]}"
        result = run_decod("join", text, *place)
    assert_refused(result, exit_code=4, holds=["127.0.0.1"])


@pytest.mark.parametrize(("stage", "exit_code"), [("99", 5), ("3", 5), ("0", 2), ("x", 2)])
def test_a_stage_that_is_not_there_is_refused(
    training: Cluster, place: list[str], stage: str, exit_code: int
) -> None:
    result = run_decod("join", join_string(training), "--stage", stage, *place)
    assert result.returncode == exit_code, result
    assert stage in result.stderr
    assert "Traceback" not in result.stderr
    if exit_code == 5:
        assert "1 to 2" in result.stderr


def test_a_data_node_with_another_run_file_is_told_the_difference(
    training: Cluster, tmp_path: Path, place: list[str]
) -> None:
    run = replace(training.run, seed=training.run.seed + 1)
    other = Cluster(tmp_path / "other", run, training.corpus)
    result = run_decod("leader", other.run_file, "--join", training.invite(Role.DATA), *place)
    assert_refused(result, exit_code=5, holds=["E-REJ-004", "run.seed is 8 here and 7 there"])


def test_a_data_node_with_other_data_is_told_the_difference(
    training: Cluster, tmp_path: Path, place: list[str]
) -> None:
    (tmp_path / "text.txt").write_text("other words " * 1000)
    prepared = run_decod("data", "prepare", tmp_path / "corpus", tmp_path / "text.txt")
    assert prepared.returncode == 0, prepared
    other = Cluster(tmp_path / "other", training.run, tmp_path / "corpus")
    result = run_decod("leader", other.run_file, "--join", training.invite(Role.DATA), *place)
    assert_refused(result, exit_code=5, holds=["E-REJ-004", "data_index_sha256"])


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_a_damaged_shard_is_named(
    corpus: Path, tmp_path: Path, place: list[str], damage: str
) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    shard = tmp_path / "corpus" / "shard-00001.bin"
    content = shard.read_bytes()
    match damage:
        case "altered":
            shard.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        case "truncated":
            shard.write_bytes(content[:-1])
        case _:
            shard.unlink()
    other = Cluster(tmp_path / "other", make_run(), tmp_path / "corpus")
    result = run_decod("leader", other.run_file, *place)
    assert_refused(result, exit_code=9, holds=["E-DAT-02", str(shard)])


@pytest.mark.parametrize(
    ("old", "new", "holds"),
    [
        ("hidden_size = 32", "hiden_size = 32", ["hiden_size", "hidden_size"]),
        ("hidden_size = 32", 'hidden_size = "wide"', ["model.hidden_size"]),
        ("hidden_size = 32", "hidden_size = 33", ["model.hidden_size", "33"]),
        ("[model]", "[modle]", ["modle", "model"]),
        ("seed = 7", "seed = = 7", []),
    ],
)
def test_a_mistake_in_the_run_file_is_shown_with_its_line(
    corpus: Path, tmp_path: Path, place: list[str], old: str, new: str, holds: list[str]
) -> None:
    run_file = Cluster(tmp_path / "other", make_run(), corpus).run_file
    lines = run_file.read_text().splitlines()
    position = lines.index(old)
    lines[position] = new
    run_file.write_text("\n".join(lines))
    result = run_decod("leader", run_file, *place)
    assert_refused(result, exit_code=3, holds=[f"{run_file}:{position + 1}", *holds])


def test_a_state_folder_serves_one_daemon(training: Cluster) -> None:
    arguments = ["--listen", "127.0.0.1:0", "--state-dir", str(training.daemons[1].state_dir)]
    result = run_decod("join", join_string(training), *arguments)
    assert_refused(result, exit_code=3, holds=["E-CFG-041", arguments[-1]])
    assert_unimpressed(training)


def test_ctrl_c_twice_ends_at_once(tmp_path: Path, corpus: Path) -> None:
    """A relay waits for the iteration's end, which a hanging device elsewhere keeps from coming."""
    with Cluster(tmp_path, make_run(min_nodes_per_stage=1), corpus) as cluster:
        cluster.start_leader(program=unhurried.PROGRAM)
        relay, hanging = cluster.start_relays(1)
        cluster.wait_for_iteration(1)
        stopped, worker = hanging.compute_pid(), relay.compute_pid()
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        try:
            relay.send(signal.SIGINT)
            cluster.wait_for(lambda: "press Ctrl-C again" in relay.stdout, "the first Ctrl-C")
            assert relay.send_until_it_ends(signal.SIGINT) == 130
            cluster.wait_for(lambda: not Path(f"/proc/{worker}").exists(), "its worker's end")
        finally:
            os.kill(stopped, signal.SIGCONT)


# --- what a stranger sends ------------------------------------------------------------------------


def test_random_bytes_on_the_tcp_port_change_nothing(training: Cluster) -> None:
    rng = random.Random(1)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for daemon in training.daemons:
        for attempt in range(20):
            with socket.create_connection(address_of(daemon), timeout=5) as connection:
                noise = rng.randbytes(rng.choice([1, 64, 4096, 65536]))
                try:
                    connection.sendall(preface + noise if attempt % 2 else noise)
                except (BrokenPipeError, ConnectionResetError):
                    continue
    assert_unimpressed(training)


def test_random_datagrams_are_counted_and_dropped(training: Cluster) -> None:
    rng = random.Random(2)
    for daemon in training.daemons:
        before = daemon.status()["counters"]
        with socket.socket(type=socket.SOCK_DGRAM) as sender:
            for _ in range(200):
                sender.sendto(rng.randbytes(rng.randrange(1, 1400)), address_of(daemon))
        # The system itself may drop some of a burst.
        wait_for_counters(training, daemon, before, "dht.", at_least=100)
    assert_unimpressed(training)


@pytest.fixture(scope="module")
def liar(training: Cluster) -> Membership:
    """A volunteer that was admitted, and never joins."""
    return training.admit("liar")


METHODS = [
    f"/{CONTROL_SERVICE}/Deliver",
    f"/{ENROLL_SERVICE}/Hello",
    f"/{STATE_SERVICE}/ReadStatus",
]


def run_id_of(daemon: Daemon) -> RunId:
    return RunId(daemon.status()["run_id"])


def call(daemon: Daemon, by: Membership, method: str, payload: bytes) -> grpc.StatusCode:
    """Returns what a node answers to bytes that are no message of ours."""
    host, port = address_of(daemon)
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with channel_to(f"{host}:{port}", by, options) as channel:
        method_call = channel.unary_unary(
            method, request_serializer=bytes, response_deserializer=bytes
        )
        try:
            method_call(payload, timeout=10.0, metadata=run_metadata(run_id_of(daemon)))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def test_garbage_in_calls_is_counted_and_dropped(training: Cluster, liar: Membership) -> None:
    """Bytes that are no protobuf, and protobuf that is no message of this run."""
    rng = random.Random(3)
    before = training.leader.status()["counters"]
    num_sent = 0
    for method in METHODS:
        for _ in range(10):
            call(training.leader, liar, method, b"\xff" + rng.randbytes(rng.randrange(0, 2000)))
            num_sent += 1
    envelope = control_pb2.Envelope(run_id="x" * 26, sender_id="y" * 52, term=-5, sequence=-1)
    request = control_pb2.DeliverRequest(envelopes=[envelope] * 50)
    for _ in range(5):
        call(training.leader, liar, METHODS[0], request.SerializeToString())
        num_sent += 1
    wait_for_counters(training, training.leader, before, "", at_least=num_sent)
    assert_unimpressed(training)


def test_a_message_that_is_too_large_is_refused(training: Cluster, liar: Membership) -> None:
    for daemon in training.daemons:
        for method in METHODS:
            code = call(daemon, liar, method, bytes(5 << 20))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, (method, code)
    assert_unimpressed(training)


def test_broken_streams_are_given_up(training: Cluster, liar: Membership) -> None:
    """Garbage where tensors and states are streamed."""
    rng = random.Random(4)
    host, port = address_of(training.leader)
    before = training.leader.status()["counters"]
    ours = run_metadata(run_id_of(training.leader))

    async def tensor(noise: list[bytes]) -> None:
        # The leader may close before all is sent.
        with suppress(OSError):
            async with sending_to(f"{host}:{port}", liar.tls) as sending:
                for each in noise:
                    await sending.head(each)
                await sending.end()

    with channel_to(f"{host}:{port}", liar) as channel:
        fetch = channel.unary_stream(f"/{STATE_SERVICE}/Fetch", bytes, bytes)
        for _ in range(10):
            noise = [b"\xff" + rng.randbytes(500) for _ in range(3)]
            asyncio.run(tensor(noise))
            with pytest.raises(grpc.RpcError):
                list(fetch(noise[0], timeout=10.0, metadata=ours))
    wait_for_counters(training, training.leader, before, "", at_least=20)
    assert_unimpressed(training)


def test_a_stranger_is_not_obeyed(training: Cluster, liar: Membership) -> None:
    """Well-formed messages of the right run from a member that never joined: it says that it is far
    ahead, that it leaves, and that a live member is dead."""
    status = training.leader.status()
    run_id, stranger = run_id_of(training.leader), liar.node_id
    relay = next(node for node in stage_nodes(status) if node["name"] == "relay-1-0")
    said: list[Message] = [
        Heartbeat(Iteration(1_000_000, 1)),
        Leave("I was never here", at_once=True),
        Suspect(NodeId(relay["id"]), "I do not like it"),
    ]
    envelopes = [
        codec.encode(run_id, stranger, 1, sequence, message)
        for sequence, message in enumerate(said * 10, start=1)
    ]
    payload = control_pb2.DeliverRequest(envelopes=envelopes).SerializeToString()
    for daemon in training.daemons:
        assert call(daemon, liar, METHODS[0], payload) is grpc.StatusCode.OK
    assert_unimpressed(training)
    assert not training.leader.events("iteration.aborted")[1:], "the first is the run's opening"


@pytest.mark.parametrize("kind", flooding.KINDS)
def test_a_member_that_floods_a_node_costs_nobody_else_the_run(
    training: Cluster, tmp_path: Path, kind: str
) -> None:
    """The leader hears the heartbeats of all others in time, and goes on with them."""
    name, leader = f"flooding {kind}", training.leader
    member = training.admit(name)
    host, port = address_of(leader)
    before = len(leader.events("peer.suspected"))

    async def flooded() -> None:
        where = f"{host}:{port}"
        async with flooding.flood(kind, where, run_id_of(leader), member, tmp_path, name):
            assert_unimpressed(training)

    asyncio.run(flooded())
    assert len(leader.events("peer.suspected")) == before
