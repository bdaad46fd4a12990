"""What a call that failed is to those who wanted its answer."""

import grpc
import grpc.aio

from decod.errors import NetworkError


class UnansweredError(NetworkError):
    """Somebody may be there, but does not answer in time: it may do so later."""


def unreachable(address: str, error: grpc.aio.AioRpcError) -> NetworkError:
    """Returns the error for a call that nobody answered."""
    details = (error.details() or "no details").splitlines()[0][:120]
    late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return (UnansweredError if late else NetworkError)(
        f"no answer from {address}",
        why=f"{error.code().name.lower()}: {details}",
        fix="check the address, that the node there runs, and that its TCP port is open",
        code="E-NET-003",
    )
