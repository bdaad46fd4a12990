from decod.wire.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_STATE_UNSPECIFIED: _ClassVar[PushState]
    PUSH_STATE_RECEIVED: _ClassVar[PushState]
    PUSH_STATE_REFUSED: _ClassVar[PushState]
    PUSH_STATE_MALFORMED: _ClassVar[PushState]
    PUSH_STATE_CORRUPTED: _ClassVar[PushState]
PUSH_STATE_UNSPECIFIED: PushState
PUSH_STATE_RECEIVED: PushState
PUSH_STATE_REFUSED: PushState
PUSH_STATE_MALFORMED: PushState
PUSH_STATE_CORRUPTED: PushState

class PushRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: TensorHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[TensorHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TensorHeader(_message.Message):
    __slots__ = ("envelope", "size_bytes", "crc32")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    envelope: _control_pb2.Envelope
    size_bytes: int
    crc32: int
    def __init__(self, envelope: _Optional[_Union[_control_pb2.Envelope, _Mapping]] = ..., size_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: PushState
    def __init__(self, state: _Optional[_Union[PushState, str]] = ...) -> None: ...
