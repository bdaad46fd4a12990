from decod.wire.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENSOR_RESULT_UNSPECIFIED: _ClassVar[TensorResult]
    TENSOR_RESULT_RECEIVED: _ClassVar[TensorResult]
    TENSOR_RESULT_REFUSED: _ClassVar[TensorResult]
    TENSOR_RESULT_MALFORMED: _ClassVar[TensorResult]
    TENSOR_RESULT_CORRUPTED: _ClassVar[TensorResult]
TENSOR_RESULT_UNSPECIFIED: TensorResult
TENSOR_RESULT_RECEIVED: TensorResult
TENSOR_RESULT_REFUSED: TensorResult
TENSOR_RESULT_MALFORMED: TensorResult
TENSOR_RESULT_CORRUPTED: TensorResult

class TensorHeader(_message.Message):
    __slots__ = ("envelope", "size_bytes", "crc32")
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    envelope: _control_pb2.Envelope
    size_bytes: int
    crc32: int
    def __init__(self, envelope: _Optional[_Union[_control_pb2.Envelope, _Mapping]] = ..., size_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...
