"""Banned nodes, seen from those who shun them: nothing is sent, and nothing is asked of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decod.daemon import gateway as module
from decod.daemon.gateway import Gateway, PeerAnswers
from decod.daemon.open_files import FileLimit
from decod.daemon.run_facts import TensorSizes
from decod.driver.driver import NodeDriver
from decod.errors import DecodError
from decod.ids import TensorId
from decod.net.server import PeerServer
from decod.protocol.core.effects import FetchState
from decod.protocol.core.events import Fault, SendFailed
from decod.protocol.core.messages import Bans, Ping
from decod.train.checkpoint.description import StateSink
from tests.support.members import ban, data_node, new_data_node, unban
from tests.support.peers import ACTIVATION, RUN, Host
from tests.waiting import wait_until

LIAR = data_node("liar")


class Shunning:
    """A node that knows of a ban, and the banned one, which listens."""

    def __init__(self, gateway: Gateway, events: list[Any], banned: Host) -> None:
        self.gateway, self.events, self.banned = gateway, events, banned
        self.member = gateway._membership


@pytest.fixture(name="here")
@asynccontextmanager
async def _here() -> AsyncIterator[Shunning]:
    events, host = list[Any](), Host()
    answers = PeerAnswers(
        name="",
        hello=lambda _: None,
        address=lambda: "",
        status=lambda: "{}",
        find_kept=lambda _: asyncio.sleep(0),
    )
    gateway = Gateway(
        RUN,
        new_data_node("me"),
        sizes=TensorSizes(activation_bytes=4, model_bytes=1000),
        answers=answers,
        files=FileLimit(1 << 20),
    )
    driver = SimpleNamespace(
        stopped=asyncio.get_running_loop().create_future(),
        post=events.append,
    )
    gateway.attach(cast("NodeDriver", driver))
    server = PeerServer(LIAR, RUN, host)
    port = await server.start("127.0.0.1", 0)
    gateway.client.set_address(LIAR.node_id, f"127.0.0.1:{port}")
    try:
        yield Shunning(gateway, events, host)
    finally:
        await gateway.close()
        await server.stop(None)


async def test_nothing_is_sent_to_a_banned_node_but_that_it_is_banned(here: Shunning) -> None:
    made = ban(here.member, LIAR.node_id)
    word = Bans(made.version, made.statement)
    here.gateway.send(LIAR.node_id, 1, Ping(1))
    here.gateway.send_tensor(LIAR.node_id, 1, ACTIVATION, memoryview(b"good"), TensorId(7))
    here.gateway.send(LIAR.node_id, 1, word)
    await wait_until(lambda: len(here.events) == 2 and here.banned.delivered)
    assert here.banned.delivered == [(here.member.node_id, 1, word)]
    assert here.events == [
        SendFailed(LIAR.node_id, Ping(1), "it is banned", fault=Fault.NONE),
        SendFailed(LIAR.node_id, ACTIVATION, "it is banned", TensorId(7), fault=Fault.NONE),
    ]
    assert await here.gateway.probe(LIAR.node_id, 1, 100) is None
    wanted = FetchState((LIAR.node_id,), 1, 1)
    with pytest.raises(DecodError, match=r"E-NET-007 .*or are banned"):
        await here.gateway.fetch_state(wanted, cast("StateSink", None))


async def test_connections_end_once_it_has_been_told_unless_the_ban_is_lifted(
    monkeypatch: pytest.MonkeyPatch, here: Shunning
) -> None:
    monkeypatch.setattr(module, "_LAST_WORD_S", 0.0)
    ban(here.member, LIAR.node_id)
    here.gateway.cut([LIAR.node_id])
    unban(here.member, LIAR.node_id)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert here.gateway.client.address_of(LIAR.node_id)
    ban(here.member, LIAR.node_id)
    here.gateway.cut([LIAR.node_id])
    await wait_until(lambda: here.gateway.client.address_of(LIAR.node_id) is None)
