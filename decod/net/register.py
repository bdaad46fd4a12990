"""The exchange of join tokens between data nodes: both sides of the call.

The caller names the digest of each record that it has. The answer holds the records that differ,
and the ids of those that are missing there. What the caller knows better goes with its next call.
Both sides merge what they get, so in the end they know the same, whoever began.
"""

import re
from collections.abc import Callable

import grpc.aio

from decod.ids import RunId
from decod.membership.certificates import DATA_NAME
from decod.membership.papers import Membership
from decod.membership.registrar import Registrar
from decod.membership.tokens import TOKENS_MAX, unpack_records
from decod.net import channel
from decod.net.connected_peer import Context, require_caller
from decod.net.failure import failed_call
from decod.net.net_limits import LIMITS, Limits
from decod.wire import codec, validate
from decod.wire.v1 import state_pb2

_EXCHANGE = f"/{channel.STATE_SERVICE}/ExchangeTokens"
_ROUNDS_MAX = 32
"""Calls in a row. One is enough if nothing has changed."""

_TOKEN_ID = re.compile(r"[a-z2-7]{8}")
_DIGEST = re.compile(r"[0-9a-f]{16}")


class RegisterKeeper:
    """The serving side: merges what other data nodes know of join tokens.

    Args:
        run_id: Calls of other runs are refused.
        blame: Counts a peer's fault. Takes the counter's name, the call, and a reason for the log.
        registrar: Has the tokens.
    """

    def __init__(
        self, run_id: RunId, blame: Callable[[str, Context, str], None], registrar: Registrar
    ) -> None:
        self._run_id, self._blame, self._registrar = run_id, blame, registrar

    async def exchange(self, data: bytes, context: Context) -> bytes:
        """Answer an ExchangeTokensRequest."""
        request = codec.parse(state_pb2.ExchangeTokensRequest, data)
        run_id = validate.run_id("run_id", request.run_id)
        require_caller("sender_id", request.sender_id, context)
        if run_id != self._run_id:
            self._blame("message.foreign", context, f"run {run_id}")
            return state_pb2.ExchangeTokensResponse().SerializeToString()
        validate.length("known", len(request.known), low=0, high=TOKENS_MAX)
        known = {_id(each.id): _digest(each.digest) for each in request.known}
        registrar = self._registrar
        registrar.learn(unpack_records(request.records))
        own = registrar.tokens.digests()
        return state_pb2.ExchangeTokensResponse(
            records=registrar.tokens.records_for(known),
            unknown=[each for each in known if each not in own],
        ).SerializeToString()


async def exchange_tokens(
    address: str, run_id: RunId, registrar: Registrar, *, limits: Limits = LIMITS
) -> None:
    """Make the data node at `address` and this one know the same join tokens.

    Raises:
        NetworkError: No answer came in time (E-NET-003).
        RejectedError: What answers there is no data node of the run, or does not take the call.
        MalformedMessageError: The answer holds no tokens.
        ConfigError: What is new can't be written here (E-CFG-039).
    """
    member, tokens = registrar.membership, registrar.tokens
    wanted, sent = set[str](), set[str]()
    async with channel.open_channel(address, limits, member.tls, DATA_NAME) as opened:
        call = opened.unary_unary(_EXCHANGE, channel.as_is, channel.as_is)
        for _ in range(_ROUNDS_MAX):
            records = tokens.pick(wanted)
            try:
                answer = await call(
                    _request(run_id, member, tokens.digests(), records),
                    metadata=channel.run_metadata(run_id),
                    timeout=limits.hello_timeout_s,
                )
            except grpc.aio.AioRpcError as error:
                raise failed_call(address, error) from error
            response = codec.parse(state_pb2.ExchangeTokensResponse, answer)
            told = unpack_records(response.records)
            registrar.learn(told)
            sent |= {record.id for record in unpack_records(records)}
            now = tokens.digests()
            behind = {
                record.id for record in told if now.get(record.id) not in (None, record.digest)
            }
            # What was not taken once is not sent again.
            wanted = ({_id(each) for each in response.unknown} | behind) & now.keys() - sent
            if not wanted and not told:
                return


def _request(run_id: RunId, member: Membership, digests: dict[str, str], records: bytes) -> bytes:
    known = [state_pb2.TokenDigest(id=each, digest=digest) for each, digest in digests.items()]
    return state_pb2.ExchangeTokensRequest(
        run_id=run_id, sender_id=member.node_id, known=known, records=records
    ).SerializeToString()


def _id(value: str) -> str:
    if _TOKEN_ID.fullmatch(value) is None:
        raise validate.malformed("token.id", value, allowed="8 characters of a-z and 2-7")
    return value


def _digest(value: str) -> str:
    if _DIGEST.fullmatch(value) is None:
        raise validate.malformed("token.digest", value, allowed="16 hexadecimal digits")
    return value
