from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HELLO_REFUSAL_UNSPECIFIED: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_VERSION_DIFFERS: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_RUN_DIFFERS: _ClassVar[HelloRefusal]
    HELLO_REFUSAL_NOT_READY: _ClassVar[HelloRefusal]
HELLO_REFUSAL_UNSPECIFIED: HelloRefusal
HELLO_REFUSAL_VERSION_DIFFERS: HelloRefusal
HELLO_REFUSAL_RUN_DIFFERS: HelloRefusal
HELLO_REFUSAL_NOT_READY: HelloRefusal

class HelloRequest(_message.Message):
    __slots__ = ("protocol_version", "run_id", "sender_id", "sender_address")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    sender_id: str
    sender_address: str
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., sender_address: _Optional[str] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol_version", "run_id", "refusal", "manifest_json", "leader_id", "leader_address", "observed_address", "node_id", "unreached")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_JSON_FIELD_NUMBER: _ClassVar[int]
    LEADER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    UNREACHED_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    refusal: HelloRefusal
    manifest_json: str
    leader_id: str
    leader_address: str
    observed_address: str
    node_id: str
    unreached: str
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., refusal: _Optional[_Union[HelloRefusal, str]] = ..., manifest_json: _Optional[str] = ..., leader_id: _Optional[str] = ..., leader_address: _Optional[str] = ..., observed_address: _Optional[str] = ..., node_id: _Optional[str] = ..., unreached: _Optional[str] = ...) -> None: ...
