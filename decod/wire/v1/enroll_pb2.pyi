from decod.wire.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrollRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENROLL_REFUSAL_UNSPECIFIED: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_VERSION_DIFFERS: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_NOT_LEADER: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_TOKEN_SPENT: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_NO_ROOT: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_WRONG_ROLE: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_BANNED: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_WAITING: _ClassVar[EnrollRefusal]
    ENROLL_REFUSAL_SENT_AWAY: _ClassVar[EnrollRefusal]

class HelloRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HELLO_REFUSAL_UNSPECIFIED: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_VERSION_DIFFERS: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_RUN_DIFFERS: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_NOT_READY: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_IDENTITY_SHARED: _ClassVar[HelloRefusal]
ENROLL_REFUSAL_UNSPECIFIED: EnrollRefusal
ENROLL_REFUSAL_VERSION_DIFFERS: EnrollRefusal
ENROLL_REFUSAL_NOT_LEADER: EnrollRefusal
ENROLL_REFUSAL_TOKEN_SPENT: EnrollRefusal
ENROLL_REFUSAL_NO_ROOT: EnrollRefusal
ENROLL_REFUSAL_WRONG_ROLE: EnrollRefusal
ENROLL_REFUSAL_BANNED: EnrollRefusal
ENROLL_REFUSAL_WAITING: EnrollRefusal
ENROLL_REFUSAL_SENT_AWAY: EnrollRefusal
HELLO_REFUSAL_UNSPECIFIED: HelloRefusal
HELLO_REFUSAL_VERSION_DIFFERS: HelloRefusal
HELLO_REFUSAL_RUN_DIFFERS: HelloRefusal
HELLO_REFUSAL_NOT_READY: HelloRefusal
HELLO_REFUSAL_IDENTITY_SHARED: HelloRefusal

class EnrollRequest(_message.Message):
    __slots__ = ("protocol_version", "public_key", "signature", "issuing_key")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ISSUING_KEY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    public_key: bytes
    signature: bytes
    issuing_key: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., issuing_key: _Optional[bytes] = ...) -> None: ...

class EnrollResponse(_message.Message):
    __slots__ = ("protocol_version", "refusal", "leader_address", "credential", "chain", "renewal_chain", "issuing_certificate", "banned")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_CHAIN_FIELD_NUMBER: _ClassVar[int]
    ISSUING_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    refusal: EnrollRefusal
    leader_address: str
    credential: _membership_pb2.Credential
    chain: bytes
    renewal_chain: bytes
    issuing_certificate: bytes
    banned: str
    def __init__(self, protocol_version: _Optional[int] = ..., refusal: _Optional[_Union[EnrollRefusal, str]] = ..., leader_address: _Optional[str] = ..., credential: _Optional[_Union[_membership_pb2.Credential, _Mapping]] = ..., chain: _Optional[bytes] = ..., renewal_chain: _Optional[bytes] = ..., issuing_certificate: _Optional[bytes] = ..., banned: _Optional[str] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "run_id", "sender_id", "sender_address", "bans", "start", "twin_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TWIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    sender_id: str
    sender_address: str
    bans: int
    start: int
    twin_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., sender_address: _Optional[str] = ..., bans: _Optional[int] = ..., start: _Optional[int] = ..., twin_address: _Optional[str] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol_version", "run_id", "refusal", "manifest_json", "leader_id", "leader_address", "observed_address", "node_id", "unreached", "charter", "bans", "clock_ms", "start", "twin_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    CHARTER_FIELD_NUMBER: _ClassVar[int]
    BANS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TWIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    refusal: HelloRefusal
    manifest_json: str
    leader_id: str
    leader_address: str
    observed_address: str
    node_id: str
    unreached: str
    charter: _membership_pb2.Statement
    bans: bytes
    clock_ms: int
    start: int
    twin_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., refusal: _Optional[_Union[HelloRefusal, str]] = ..., manifest_json: _Optional[str] = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., observed_address: _Optional[str] = ..., node_id: _Optional[str] = ..., unreached: _Optional[str] = ..., charter: _Optional[_Union[_membership_pb2.Statement, _Mapping]] = ..., bans: _Optional[bytes] = ..., clock_ms: _Optional[int] = ..., start: _Optional[int] = ..., twin_address: _Optional[str] = ...) -> None: ...
