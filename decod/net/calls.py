"""The path of every call from gRPC to its method: refusals, deadlines, and error codes.

Every method is registered as a stream of requests, even if it takes one message. Otherwise gRPC
would read the whole body before this node could refuse the call or give it up.

gRPC's serializers are not used. Methods parse the bytes themselves, so that their errors are mapped
to codes here: gRPC would send the text of an exception to the peer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from itertools import count
from typing import Any, TypeVar

import grpc
import grpc.aio
from typing_extensions import override

from decod.clocks import wall_clock
from decod.errors import DecodError, MalformedMessageError
from decod.membership.ban_list import BanBook
from decod.membership.certificates import Caller, Purpose
from decod.net import channel
from decod.net.door import Context, Door, FarEnd, caller_in, host_of, proven_id
from decod.net.net_limits import Limits
from decod.net.stream import next_message
from decod.wire import validate

_log = logging.getLogger(__name__)

T = TypeVar("T")

Called = Callable[[object, Context], Awaitable[T]]
"""A method as gRPC calls it. The first argument, an iterator over the messages, is not used."""


class Who(Enum):
    """The callers that a method allows. The certificate of the connection decides."""

    MEMBER = auto()
    DATA_NODE = auto()
    INVITED = auto()
    """Members, and holders of a join token that still lets them in."""
    CERTIFIED = auto()
    """Whoever has a certificate at all: holders of join tokens and former members too."""


class RefusedCallError(Exception):
    """A method refuses a call, for a reason that need not be the caller's fault."""

    def __init__(self, status: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.status = status
        self.details = details


class Calls(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # Only the stubs' class takes one.
    """The methods of one server.

    Args:
        door: Tells this run's calls from others, and counts faults.
        limits: Sizes and timeouts.
        bans: The bans that this node knows of.
        uninvited: Returns why the holder of a join token may not come in; empty if it may.
    """

    def __init__(
        self, door: Door, limits: Limits, bans: BanBook, uninvited: Callable[[Caller], str]
    ) -> None:
        self._door = door
        self._bans = bans
        self._limits = limits
        self._uninvited = uninvited
        self._error_ids = count(1)
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._open_to_all: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._stranger = grpc.stream_unary_rpc_method_handler(self._refuse_stranger)

    def open_to_all(self, path: str, method: Called[bytes], who: Who = Who.MEMBER) -> None:
        """Serve `path` to callers that need not name this run."""
        allowed = self._allowed(path, method, who)
        self._open_to_all[path] = grpc.stream_unary_rpc_method_handler(allowed)

    def add(self, path: str, method: Called[bytes], who: Who = Who.MEMBER) -> None:
        """Serve `path` to callers that name this run."""
        known = self._known(path, method, who)
        self._methods[path] = grpc.stream_unary_rpc_method_handler(known)

    def add_stream(self, path: str, method: Called[None]) -> None:
        """Serve `path` to members that name this run. `method` writes answers to the context."""
        known = self._known(path, method, Who.MEMBER)
        self._methods[path] = grpc.stream_stream_rpc_method_handler(known)

    def _known(self, path: str, method: Called[T], who: Who) -> Called[T]:
        async def called(requests: object, context: Context) -> T:
            self._door.know(context)
            return await method(requests, context)

        return self._allowed(path, called, who)

    def _allowed(self, path: str, method: Called[T], who: Who) -> Called[T]:
        """Refuse callers that may not call a method, or have too many calls open.

        Nothing of the call's body is read before.
        """
        service = path.split("/")[1]

        async def called(requests: object, context: Context) -> T:
            if refusal := self.refusal(context, who):
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, refusal)
            source = host_of(context), proven_id(context), service
            if not self._door.enter(*source):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, channel.TOO_MANY)
            try:
                return await method(requests, context)
            finally:
                self._door.leave(*source)

        return called

    def refusal(self, context: FarEnd, who: Who = Who.MEMBER) -> str:
        """Return why a caller may not do something, as it is told; empty if it may."""
        if not self._door.hear(context):
            return channel.NOT_ALLOWED
        caller = caller_in(context)
        refusal = self._refusal(caller, who)
        if refusal or caller is None:
            self._door.blame("caller.refused", context, refusal)
            return channel.NOT_ALLOWED
        # The registrar answers banned nodes that ask for papers.
        if who is not Who.CERTIFIED and (ban := self._bans.refusal(caller.node_id)):
            # No fault of its own: it may not know yet.
            self._door.note("caller.refused", context, f"{caller.node_id} is {ban}")
            return f"{channel.BANNED} {ban}"
        return ""

    def _refusal(self, caller: Caller | None, who: Who) -> str:
        """Return why a caller may not call a method, for this node's log; empty if it may."""
        if caller is None:
            return "a certificate that no node of decod has"
        if wall_clock() > caller.expires_s:
            # TLS looks at this only when a connection begins.
            return f"the certificate of {caller.node_id} has expired"
        if who is Who.CERTIFIED:
            return ""
        if who is Who.INVITED and caller.purpose is Purpose.JOINING:
            return self._uninvited(caller)
        if caller.purpose is not Purpose.PEER:
            return f"{caller.node_id} is no member, but asks to be one"
        if who is Who.DATA_NODE and not caller.is_data:
            return f"{caller.node_id} is no data node"
        return ""

    @override
    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        path = handler_call_details.method
        if path in self._open_to_all:
            return self._open_to_all[path]
        if self._door.names_run(handler_call_details.invocation_metadata):
            return self._methods.get(path)
        return self._stranger

    async def _refuse_stranger(self, _requests: object, context: Context) -> bytes:
        self._door.hear(context)
        self._door.blame("message.foreign", context, "a call of another run, or of none")
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, channel.OTHER_RUN)
        raise AssertionError("abort raises")

    def once(
        self, method: Callable[[bytes, Context], Awaitable[T]], *, size_max_bytes: int
    ) -> Called[T]:
        """Wrap a method that takes one message: bound its size, and map errors to codes."""

        async def called(context: Context) -> T:
            async with asyncio.timeout(self._limits.control_timeout_s):
                data = await next_message(context) or b""
            if len(data) > size_max_bytes:
                allowed = f"at most {size_max_bytes} bytes"
                raise validate.malformed("request", f"{len(data)} bytes", allowed=allowed)
            return await method(data, context)

        return self.guarded(called)

    def guarded(self, method: Callable[[Context], Awaitable[T]]) -> Called[T]:
        """Wrap a method: map its errors to codes."""

        async def called(_requests: object, context: Context) -> T:
            try:
                return await method(context)
            except Exception as error:  # noqa: BLE001 - gRPC would send its text to the peer.
                status, text = self._code_of(error, context)
            await context.abort(status, text)
            raise AssertionError("abort raises")

        return called

    def _code_of(self, error: Exception, context: Context) -> tuple[grpc.StatusCode, str]:
        """Count an error of a method; return the status and details that its caller gets."""
        match error:
            case MalformedMessageError():
                self._door.blame("message.malformed", context, error.what)
                return grpc.StatusCode.INVALID_ARGUMENT, error.code
            case RefusedCallError():
                return error.status, error.details
            case TimeoutError() | grpc.aio.BaseError() | grpc.RpcError():
                self._door.note("rpc.failed", context, type(error).__name__)
                return grpc.StatusCode.ABORTED, "E-NET-006"
            case DecodError():
                # Not a bug, since it has a code: a kept state has made room for a newer one, say.
                self._door.note("rpc.failed", context, f"{error.what}: {error.why}")
                return grpc.StatusCode.INTERNAL, error.code
        error_id = next(self._error_ids)
        self._door.note("rpc.failed", context, f"error id {error_id}")
        _log.error("rpc.failed error id %d", error_id, exc_info=error)
        return grpc.StatusCode.INTERNAL, f"E-INT-001 {error_id}"
