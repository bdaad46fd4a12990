"""Questions to a node over a connection of their own: which run it is in, and the run's status."""

import asyncio
import math
import socket
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import grpc
import grpc.aio

from decod.errors import DecodError, NetworkError, RejectedError
from decod.ids import NodeId, RunId
from decod.membership.certificates import MEMBER_NAME, TlsIdentity, peer_name
from decod.membership.credential import Statement, statement_from
from decod.membership.papers import Membership
from decod.membership.receipts import ReceiptAnswer
from decod.membership.statements import check_charter
from decod.net import channel
from decod.net.address import LOCAL, split_address
from decod.net.channel import UNPROVEN, failed_call, other_run, other_version, shared_identity
from decod.net.net_limits import LIMITS, Limits
from decod.run.protocol_config import PROTOCOL_VERSION
from decod.wire import codec, validate
from decod.wire.v1 import enroll_pb2, state_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloRequest:
    """A stranger's statements about itself. Nothing in them is proven."""

    run_id: RunId | None = None
    """The run that it expects; None for any."""
    sender: NodeId | None = None
    """None for a visitor that will not join."""
    sender_address: str = ""
    observed_address: str = ""
    """IP address from which the call came, without port; empty if it is not known."""
    bans: int | None = None
    """The version of the list of bans that it has. None: it wants no later one."""
    start: int = 0
    """Drawn at each start of its daemon; 0 if it does not say."""
    twin_address: str = ""
    """The address of another host with the identity of the node that it asks; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloInfo:
    """A node's answer to strangers about its run."""

    run_id: RunId
    manifest_json: str
    node_id: NodeId
    """The node that answered."""
    leader: NodeId | None = None
    leader_address: str = ""
    charter: Statement
    """A data node's word that the run and its manifest belong together."""
    bans: bytes = b""
    """A list of bans that is later than the asker's, as it travels: not checked. The server fills
    it in."""
    observed_address: str = ""
    """IP address of the asker as the node sees it. The server fills it in."""
    unreached: str = ""
    """The reason why the asker can't be reached at its address, for its operator. Empty if it was
    reached, or if no node has tried. The server fills it in."""
    clock_s: float = 0.0
    """The node's wall clock, in seconds of the Unix epoch. The server fills it in."""
    start: int = 0
    """Drawn at each start of the node's daemon. The server fills it in."""


@dataclass(frozen=True, slots=True)
class Found:
    """The findings of a node about another that wants to be let in."""

    unreached: str = ""
    """The reason why it can't be reached at its address; empty if it can, or if that was not
    tried."""
    twin_address: str = ""
    """The address of another host that had its identity first; empty if none is known."""


class Asker(Protocol):
    """A member of a run, or the holder of a join token."""

    @property
    def root(self) -> bytes:
        """The public key of the run's root."""

    @property
    def tls(self) -> TlsIdentity:
        """The certificate that it shows, and those that it believes."""


async def hello(
    address: str,
    request: HelloRequest,
    asker: Asker,
    *,
    name: str = MEMBER_NAME,
    limits: Limits = LIMITS,
) -> HelloInfo:
    """Ask the node at `address` about its run.

    Args:
        address: `host:port`, or that of a local socket.
        request: Names the asker. `observed_address` is ignored: the node sees it for itself. If the
            request has a sender and its address, the node dials that address before it answers.
        asker: This node. With no more than a token it must not name itself in the request.
        name: The name in the other's certificate; by default, that of any member.
        limits: Timeouts.

    Raises:
        NetworkError: No answer came in time (E-NET-003), the node can't describe its run yet
            (E-NET-004), or `address` can't be read (E-NET-011).
        RejectedError: The node speaks another version (E-REJ-002), or belongs to another run
            (E-REJ-003) or root (E-REJ-005). Or it does not allow the call (E-REJ-009). If this node
            is banned, it says so (E-REJ-020). Or another host has this node's identity (E-REJ-022).
        MalformedMessageError: A field of the answer is missing, too large or out of range, or its
            charter proves nothing.
    """
    if not address.startswith(LOCAL):
        split_address(address)
    wire_request = enroll_pb2.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        run_id=request.run_id or "",
        sender_id=request.sender or "",
        sender_address=request.sender_address,
        bans=request.bans,
        start=request.start,
        twin_address=request.twin_address,
    )
    timeout_s = limits.hello_timeout_s
    if request.sender_address:
        timeout_s += limits.dial_timeout_s
    async with channel.open_channel(address, limits, asker.tls, name) as opened:
        call = opened.unary_unary(f"/{channel.ENROLL_SERVICE}/Hello", channel.as_is, channel.as_is)
        try:
            data = await call(wire_request.SerializeToString(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise failed_call(address, error) from error
    response = codec.parse(enroll_pb2.HelloResponse, data)
    _raise_refusal(address, response, request.run_id)
    info = _checked_info(response, request, limits)
    check_charter(info.charter, asker.root, info.run_id, info.manifest_json)
    return info


def _raise_refusal(address: str, response: enroll_pb2.HelloResponse, run_id: RunId | None) -> None:
    if response.protocol_version != PROTOCOL_VERSION:
        raise other_version(address, response.protocol_version)
    if response.refusal == enroll_pb2.HELLO_REFUSAL_RUN_DIFFERS:
        raise RejectedError(
            f"{address} belongs to run {validate.run_id('run_id', response.run_id)}",
            why=f"this node wants to join {run_id}",
            fix="ask the organiser for the current join string",
            code="E-REJ-003",
        )
    if response.refusal == enroll_pb2.HELLO_REFUSAL_IDENTITY_SHARED:
        raise shared_identity(validate.address("twin_address", response.twin_address))
    if response.refusal != enroll_pb2.HELLO_REFUSAL_UNSPECIFIED:
        raise NetworkError(
            f"{address} can't describe its run at present",
            why="it is starting, or has lost its leader",
            fix="try again in a minute, or with the address of another node",
            code="E-NET-004",
        )


def _checked_info(
    response: enroll_pb2.HelloResponse, request: HelloRequest, limits: Limits
) -> HelloInfo:
    run_id = validate.run_id("run_id", response.run_id)
    if request.run_id not in (None, run_id):
        raise validate.malformed("run_id", run_id, allowed=str(request.run_id))
    manifest_size_bytes = len(response.manifest_json.encode())
    if manifest_size_bytes > limits.manifest_size_max_bytes:
        allowed = f"at most {limits.manifest_size_max_bytes} bytes"
        raise validate.malformed("manifest_json", f"{manifest_size_bytes} bytes", allowed=allowed)
    leader = None
    leader_address = ""
    if response.leader_id:
        leader = validate.node_id("leader_id", response.leader_id)
        leader_address = validate.address("leader_address", response.leader_address)
    return HelloInfo(
        run_id=run_id,
        manifest_json=response.manifest_json,
        node_id=validate.node_id("node_id", response.node_id),
        leader=leader,
        leader_address=leader_address,
        charter=statement_from(response.charter),
        bans=response.bans,
        observed_address=validate.printable(64)("observed_address", response.observed_address),
        unreached=validate.reason("unreached", response.unreached),
        clock_s=response.clock_ms / 1000,
        start=validate.number("start", response.start),
    )


async def ask_status(
    address: str,
    run_id: RunId,
    membership: Membership,
    *,
    timeout_s: float,
    limits: Limits = LIMITS,
) -> str:
    """Return the status of the run as the node at `address` sees it: JSON, but not checked.

    Raises:
        NetworkError: No answer came in time (E-NET-003), or `address` can't be read (E-NET-011).
        RejectedError: The node belongs to another run (E-REJ-003).
        MalformedMessageError: The answer is too long, or is no ReadStatusResponse.
    """
    request = state_pb2.ReadStatusRequest(run_id=run_id, sender_id=membership.node_id)
    asked = _Question("ReadStatus", request.SerializeToString(), run_id, timeout_s)
    data = await _ask(address, asked, membership, MEMBER_NAME, limits)
    text = codec.parse(state_pb2.ReadStatusResponse, data).status_json
    if not text:
        raise other_run(address)
    if len(text) > limits.state_manifest_size_max_bytes:
        allowed = f"at most {limits.state_manifest_size_max_bytes} characters"
        raise validate.malformed("status_json", f"{len(text)} characters", allowed=allowed)
    return text


async def ask_receipt(
    address: str,
    issuer: NodeId,
    run_id: RunId,
    membership: Membership,
    *,
    timeout_s: float,
    limits: Limits = LIMITS,
) -> ReceiptAnswer:
    """Ask a data node for its receipt for this node's work. The receipt is not checked.

    Args:
        address: `host:port` of the data node.
        issuer: The data node.
        run_id: The run.
        membership: This node's.
        timeout_s: How long to wait.
        limits: Sizes.

    Raises:
        NetworkError: No answer came in time (E-NET-003), or `address` can't be read (E-NET-011).
        RejectedError: The node belongs to another run (E-REJ-003).
        MalformedMessageError: The answer is no ReadReceiptResponse.
    """
    request = state_pb2.ReadReceiptRequest(run_id=run_id, sender_id=membership.node_id)
    asked = _Question("ReadReceipt", request.SerializeToString(), run_id, timeout_s)
    data = await _ask(address, asked, membership, peer_name(issuer), limits)
    response = codec.parse(state_pb2.ReadReceiptResponse, data)
    receipt = statement_from(response.receipt) if response.HasField("receipt") else None
    return ReceiptAnswer(receipt, validate.iteration("iteration", response.iteration))


@dataclass(frozen=True, slots=True)
class _Question:
    """A call of `StateService`."""

    method: str
    request: bytes
    run_id: RunId
    timeout_s: float


async def _ask(
    address: str, asked: _Question, membership: Membership, name: str, limits: Limits
) -> bytes:
    """Return the answer to a question, over a connection of its own.

    Raises:
        NetworkError: No answer came in time (E-NET-003), or `address` can't be read (E-NET-011).
        RejectedError: The node belongs to another run (E-REJ-003).
    """
    split_address(address)
    async with channel.open_channel(address, limits, membership.tls, name) as opened:
        path = f"/{channel.STATE_SERVICE}/{asked.method}"
        call = opened.unary_unary(path, channel.as_is, channel.as_is)
        try:
            answer: bytes = await call(
                asked.request,
                timeout=asked.timeout_s,
                metadata=channel.run_metadata(asked.run_id),
            )
        except grpc.aio.AioRpcError as error:
            raise failed_call(address, error) from error
    return answer


# Dial a node at the address that it gives for itself, before it is let in.
#
# A node behind a firewall can reach others, so it looks fine from its own side. Before a node is
# let in, another dials it back, and describes any failure in words for its operator.

_FOUND_MAX = 1024

_ANOTHER = "another node answers there"


@dataclass(frozen=True, slots=True)
class Dialled:
    """The findings of a dial."""

    unreached: str = ""
    """The reason why the node can't be reached, for its operator; empty if it can."""
    start: int = 0
    """The number of its daemon's start; 0 if it can't be reached."""


class DialBack:
    """Dials to nodes, one at a time for each node and address.

    Args:
        run_id: The run that the dialled nodes must be in.
        membership: That of the node that dials.
        limits: Timeouts, and the number of dials at a time.
    """

    def __init__(self, run_id: RunId, membership: Membership, limits: Limits = LIMITS) -> None:
        self._request = HelloRequest(run_id=run_id, sender=membership.node_id)
        self._membership = membership
        self._limits = limits
        self._dials: dict[tuple[NodeId, str, str], asyncio.Task[Dialled]] = {}
        """The dials, by node, address, and what the node is told of a twin."""
        self._found: OrderedDict[tuple[NodeId, str], tuple[float, Dialled]] = OrderedDict()
        """The instant when each node was last reached at its address, on the loop's clock."""

    async def dial(self, node: NodeId, address: str, start: int = 0) -> Dialled | None:
        """Dial `node` at `address`, unless it was reached there within `dial_again_s`.

        Args:
            node: The node.
            address: Where it says that it is.
            start: The start of its daemon that it must have been. 0: any.

        Returns:
            What was found. None if the dial was cancelled, because too many others came after it.
        """
        key = (node, address)
        now_s = asyncio.get_running_loop().time()
        at_s, known = self._found.get(key, (-math.inf, Dialled()))
        if now_s - at_s < self._limits.dial_again_s and start in (0, known.start):
            return known
        dialled = await self.dial_anew(node, address)
        if dialled is not None and not dialled.unreached:
            self._found.pop(key, None)
            self._found[key] = (asyncio.get_running_loop().time(), dialled)
            if len(self._found) > _FOUND_MAX:
                self._found.popitem(last=False)
        return dialled

    async def dial_anew(self, node: NodeId, address: str, twin_address: str = "") -> Dialled | None:
        """Dial `node` at `address`, even if it was reached there a moment ago; else as `dial`.

        Args:
            node: The node.
            address: Where it was last; or the local socket that leads to it.
            twin_address: It is told that another host has its identity there. Empty: it is not.
        """
        key = (node, address, twin_address)
        if key not in self._dials:
            if len(self._dials) >= self._limits.dials_max:
                # A reachable node answers long before its dial is the oldest.
                next(iter(self._dials.values())).cancel()
            self._dials[key] = asyncio.create_task(self._dial(*key))
            self._dials[key].add_done_callback(lambda _: self._dials.pop(key))
        dial = self._dials[key]
        # Others may wait for the same dial, so a cancelled caller must not cancel it.
        await asyncio.wait({dial})
        return None if dial.cancelled() else dial.result()

    async def close(self) -> None:
        """Cancel all dials and wait until they have ended."""
        dials = list(self._dials.values())
        for dial in dials:
            dial.cancel()
        await asyncio.gather(*dials, return_exceptions=True)

    async def _dial(self, node: NodeId, address: str, twin_address: str) -> Dialled:
        try:
            async with asyncio.timeout(self._limits.dial_timeout_s):
                if not address.startswith(LOCAL):
                    await _connect(address)
                answered = await hello(
                    address,
                    replace(self._request, twin_address=twin_address),
                    self._membership,
                    name=peer_name(node),
                    limits=self._limits,
                )
        except (OSError, DecodError) as error:
            return Dialled(self._reason_of(error))
        # Its certificate has proven who it is: what it says must agree with that.
        return Dialled(start=answered.start) if answered.node_id == node else Dialled(_ANOTHER)

    def _reason_of(self, error: OSError | DecodError) -> str:
        match error:
            case TimeoutError():
                seconds = f"{self._limits.dial_timeout_s:g} s"
                return f"no answer within {seconds}, so a firewall or router may be in the way"
            case ConnectionRefusedError():
                return "nobody listens there"
            case socket.gaierror():
                return "that name is unknown"
            case OSError():
                return f"the system says: {error.strerror or error}"
            case RejectedError():
                if error.code == UNPROVEN:
                    return _ANOTHER
                return "a node of another run, or another release, answers there"
        return "somebody listens there, but does not answer as a node does"


async def _connect(address: str) -> None:
    """Open a connection and close it. The system's errors say more than gRPC's."""
    _, writer = await asyncio.open_connection(*split_address(address))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
