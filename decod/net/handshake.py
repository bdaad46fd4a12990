"""A bare TLS handshake. It tells a node that refuses this one's certificate from a full one.

gRPC reports both as "Socket closed". A full node closes a connection at once. A node that refuses a
certificate has shown its own before, and so has proven who it is. A node that is content begins to
speak HTTP/2.
"""

import asyncio
import os
import ssl
from contextlib import suppress

from decod.membership.certificates import TlsIdentity
from decod.net.address import split_address


async def is_refused(address: str, shown: TlsIdentity, name: str, *, timeout_s: float) -> bool:
    """Return whether the node at an address proves who it is, and then refuses a certificate.

    False also means that nothing is known: nobody answers, say.

    Args:
        address: `host:port`.
        shown: What this node shows, and whom it believes.
        name: The name that must be in the other's certificate.
        timeout_s: How long to wait for the node.
    """
    host, port = split_address(address)
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_context(shown), server_hostname=name
            )
            try:
                # With TLS 1.3, a client has finished before the server looks at its certificate.
                return not await reader.read(1)
            except ssl.SSLError:
                return True
            finally:
                writer.transport.abort()
    return False


def _context(shown: TlsIdentity) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=shown.anchors.decode())
    # gRPC refuses whoever does not ask for HTTP/2.
    context.set_alpn_protocols(["h2"])
    # It loads keys from files only. This one is in memory, and nobody else can open it.
    descriptor = os.memfd_create("decod-certificate")
    try:
        os.write(descriptor, shown.key + shown.chain)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
