"""Listening for peers: on TCP for calls, and on UDP of the same port for the DHT."""

from decod.errors import NetworkError
from decod.net.dht import Dht
from decod.net.server import PeerServer

_NUM_PORTS_TRIED = 16
"""Attempts if the system chooses the port, since it must be free for both."""


async def listen(server: PeerServer, dht: Dht, host: str, port: int) -> int:
    """Start both, and return the port.

    Args:
        server: Takes calls.
        dht: Takes datagrams.
        host: The local address.
        port: 0: the system chooses a free one.

    Raises:
        NetworkError: The port is in use, or the address is not this host's (E-NET-002).
    """
    num_tries = _NUM_PORTS_TRIED if port == 0 else 1
    while True:
        found = await server.start(host, port)
        try:
            await dht.start(host, found)
        except NetworkError:
            await server.stop(0)
            num_tries -= 1
            if num_tries == 0:
                raise
        else:
            return found
