"""Which port a node listens on if the wanted one is in use."""

import asyncio
from typing import cast

import pytest

from decod.config.node_config import NodeConfig
from decod.daemon.reachability import MORE_PORTS, listen
from decod.errors import NetworkError
from decod.net.dht import Dht
from decod.net.server import PeerServer


def in_use(port: int) -> NetworkError:
    return NetworkError(f"port {port}", why="it is in use", fix="take another", code="E-NET-002")


class FakeServer:
    """Takes calls on ports that are free for TCP."""

    def __init__(self, taken: set[int]) -> None:
        self.taken = taken
        self.port: int | None = None

    async def start(self, _: str, port: int) -> int:
        assert self.port is None, "it listens already"
        if port in self.taken:
            raise in_use(port)
        self.port = port
        return port

    async def stop(self, _: float) -> None:
        self.port = None


class FakeDht:
    """Takes datagrams on ports that are free for UDP."""

    def __init__(self, taken: set[int]) -> None:
        self.taken = taken

    async def start(self, _: str, port: int) -> int:
        if port in self.taken:
            raise in_use(port)
        return port


def found(*, tcp: set[int], udp: set[int], port: int = 7700, moves_port: bool = True) -> int:
    server, lines = FakeServer(tcp), list[str]()
    config = NodeConfig(listen_port=port, moves_port=moves_port)
    listening = listen(cast("PeerServer", server), cast("Dht", FakeDht(udp)), config, lines.append)
    result = asyncio.run(listening)
    assert server.port == result
    moved = [f"port {port} is in use: this node listens on port {result}"]
    assert lines == ([] if result == port else moved)
    return result


def test_the_wanted_port_is_taken_if_it_is_free() -> None:
    assert found(tcp=set(), udp=set()) == 7700
    assert found(tcp={7701}, udp={7701}, moves_port=False) == 7700


def test_the_next_port_that_is_free_for_both_is_taken() -> None:
    assert found(tcp={7700, 7702}, udp={7701, 7703}) == 7704


def test_a_port_that_the_operator_has_chosen_is_taken_or_none() -> None:
    for tcp, udp in (({7700}, set[int]()), (set[int](), {7700})):
        with pytest.raises(NetworkError, match="port 7700"):
            found(tcp=tcp, udp=udp, moves_port=False)


def test_there_is_an_end_to_trying() -> None:
    last = 7700 + MORE_PORTS
    assert found(tcp={*range(7700, last)}, udp=set()) == last
    with pytest.raises(NetworkError, match=f"port {last}"):
        found(tcp={*range(7700, last + 1)}, udp=set())
    with pytest.raises(NetworkError, match="port 65535"):
        found(tcp={65534, 65535}, udp=set(), port=65534)
