"""Listening for peers: on TCP for calls, and on UDP of the same port for the DHT."""

from collections.abc import Callable

from decod.config.node_config import NodeConfig
from decod.errors import NetworkError
from decod.net.dht import Dht
from decod.net.server import PeerServer

MORE_PORTS = 15
"""Ports behind the wanted one that are tried if it is in use, and the operator chose none."""

_NUM_PORTS_TRIED = 16
"""Attempts if the system chooses the port, since it must be free for both."""


async def listen(
    server: PeerServer, dht: Dht, config: NodeConfig, say: Callable[[str], None] | None = None
) -> int:
    """Start both at the configured address, and return the port.

    Args:
        server: Takes calls.
        dht: Takes datagrams.
        config: Says where, and whether one of the next `MORE_PORTS` ports is as good.
        say: Takes a line for the operator's terminal, if it is another port.

    Raises:
        NetworkError: The port is in use, or the address is not this host's (E-NET-002).
    """
    host, port = config.listen_host, config.listen_port
    tried = [0] * _NUM_PORTS_TRIED if port == 0 else [port]
    if port and config.moves_port:
        tried += range(port + 1, min(port + MORE_PORTS, 65_535) + 1)
    for number, candidate in enumerate(tried, start=1):
        try:
            found = await _listen_on(server, dht, host, candidate)
        except NetworkError:
            if number == len(tried):
                raise
        else:
            if port not in (0, found) and say is not None:
                say(f"port {port} is in use: this node listens on port {found}")
            return found
    raise AssertionError("at least one port is tried")


async def _listen_on(server: PeerServer, dht: Dht, host: str, port: int) -> int:
    found = await server.start(host, port)
    try:
        await dht.start(host, found)
    except NetworkError:
        await server.stop(0)
        raise
    return found
