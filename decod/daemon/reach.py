"""Under which address others can reach this node."""

import socket

from decod.config.node import NodeConfig, parse_listen


def advertised(config: NodeConfig, port: int) -> str:
    """Return the address that others are told: the operator's, or what can be found out here."""
    if config.advertise is None:
        return f"{_reachable(config.listen_host)}:{port}"
    host, port = parse_listen(config.advertise)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    """Return the address that others should dial when listening on `host`."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return f"[{host}]" if ":" in host else host
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    target = "2001:db8::1" if host == "::" else "192.0.2.1"
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Chooses the outgoing interface; nothing is sent.
            probe.connect((target, 9))
            found: str = probe.getsockname()[0]
        except OSError:
            found = "::1" if host == "::" else "127.0.0.1"
    return f"[{found}]" if ":" in found else found
