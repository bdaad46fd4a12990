from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("connection_id",)
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    connection_id: bytes
    def __init__(self, connection_id: _Optional[bytes] = ...) -> None: ...

class CarryRequest(_message.Message):
    __slots__ = ("connection_id", "data")
    CONNECTION_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    connection_id: bytes
    data: bytes
    def __init__(self, connection_id: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class CarryResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("goal", "data")
    GOAL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    goal: str
    data: bytes
    def __init__(self, goal: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("connected", "data")
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    data: bytes
    def __init__(self, connected: _Optional[bool] = ..., data: _Optional[bytes] = ...) -> None: ...
