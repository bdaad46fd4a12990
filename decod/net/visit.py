"""A look at a run before joining it, by a host that has no more than a join token."""

from decod.errors import RejectedError
from decod.membership.certificates import DATA_NAME
from decod.net import channel
from decod.net.ask import HelloInfo, HelloRequest, hello
from decod.net.enrolment import Enrollee, token_spent, why_failed
from decod.net.failure import ClosedError
from decod.net.net_limits import LIMITS, Limits


async def visit(address: str, enrollee: Enrollee, *, limits: Limits = LIMITS) -> HelloInfo:
    """Ask the data node at `address` about its run. That is no use of the token.

    Args:
        address: `host:port`.
        enrollee: The holder of the token. It does not become a member.
        limits: Timeouts.

    Raises:
        RejectedError: The token lets nobody in (E-REJ-010), or is not known there (E-REJ-011).
        DecodError: As `hello` raises it.
    """
    try:
        return await hello(address, HelloRequest(), enrollee, name=DATA_NAME, limits=limits)
    except ClosedError as error:
        raise await why_failed(address, enrollee, error, limits) from error
    except RejectedError as error:
        if error.code == channel.NOT_ALLOWED:
            raise token_spent(address) from error
        raise
