from decod.wire.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_REFUSAL_UNSPECIFIED: _ClassVar[FetchRefusal]
    FETCH_REFUSAL_BUSY: _ClassVar[FetchRefusal]
    FETCH_REFUSAL_GONE: _ClassVar[FetchRefusal]
FETCH_REFUSAL_UNSPECIFIED: FetchRefusal
FETCH_REFUSAL_BUSY: FetchRefusal
FETCH_REFUSAL_GONE: FetchRefusal

class DescribeRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "iteration", "with_optimizer", "stage_index", "past_hash", "base_hash", "cut")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    WITH_OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PAST_HASH_FIELD_NUMBER: _ClassVar[int]
    BASE_HASH_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    iteration: int
    with_optimizer: bool
    stage_index: int
    past_hash: str
    base_hash: str
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., iteration: _Optional[int] = ..., with_optimizer: _Optional[bool] = ..., stage_index: _Optional[int] = ..., past_hash: _Optional[str] = ..., base_hash: _Optional[str] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("description", "refusal")
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    description: str
    refusal: str
    def __init__(self, description: _Optional[str] = ..., refusal: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "state_id", "first_chunk", "num_chunks")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    state_id: str
    first_chunk: int
    num_chunks: int
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., state_id: _Optional[str] = ..., first_chunk: _Optional[int] = ..., num_chunks: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("refusal", "data")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    refusal: FetchRefusal
    data: bytes
    def __init__(self, refusal: _Optional[_Union[FetchRefusal, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "state_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    state_id: str
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., state_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "iteration", "stage_index", "folder", "cut")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    iteration: int
    stage_index: int
    folder: str
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., iteration: _Optional[int] = ..., stage_index: _Optional[int] = ..., folder: _Optional[str] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("refusal", "lacks_store", "description", "num_bytes", "done")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LACKS_STORE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    lacks_store: bool
    description: str
    num_bytes: int
    done: bool
    def __init__(self, refusal: _Optional[str] = ..., lacks_store: _Optional[bool] = ..., description: _Optional[str] = ..., num_bytes: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class ReadBlockRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "shard_index", "offset_bytes", "size_bytes")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARD_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    shard_index: int
    offset_bytes: int
    size_bytes: int
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., shard_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReadBlockResponse(_message.Message):
    __slots__ = ("data", "refusal")
    DATA_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    refusal: str
    def __init__(self, data: _Optional[bytes] = ..., refusal: _Optional[str] = ...) -> None: ...

class ExchangeTokensRequest(_message.Message):
    __slots__ = ("run_id", "sender_id", "known", "records")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    known: _containers.RepeatedCompositeFieldContainer[TokenDigest]
    records: bytes
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ..., known: _Optional[_Iterable[_Union[TokenDigest, _Mapping]]] = ..., records: _Optional[bytes] = ...) -> None: ...

class TokenDigest(_message.Message):
    __slots__ = ("id", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: str
    digest: str
    def __init__(self, id: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class ExchangeTokensResponse(_message.Message):
    __slots__ = ("records", "unknown")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    records: bytes
    unknown: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, records: _Optional[bytes] = ..., unknown: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadStatusRequest(_message.Message):
    __slots__ = ("run_id", "sender_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ...) -> None: ...

class ReadStatusResponse(_message.Message):
    __slots__ = ("status_json",)
    STATUS_JSON_FIELD_NUMBER: _ClassVar[int]
    status_json: str
    def __init__(self, status_json: _Optional[str] = ...) -> None: ...

class ReadReceiptRequest(_message.Message):
    __slots__ = ("run_id", "sender_id")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SENDER_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    sender_id: str
    def __init__(self, run_id: _Optional[str] = ..., sender_id: _Optional[str] = ...) -> None: ...

class ReadReceiptResponse(_message.Message):
    __slots__ = ("receipt", "iteration")
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    receipt: _membership_pb2.Statement
    iteration: int
    def __init__(self, receipt: _Optional[_Union[_membership_pb2.Statement, _Mapping]] = ..., iteration: _Optional[int] = ...) -> None: ...
