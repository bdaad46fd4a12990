from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MemberRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_ROLE_UNSPECIFIED: _ClassVar[MemberRole]
    MEMBER_ROLE_DATA: _ClassVar[MemberRole]
    MEMBER_ROLE_RELAY: _ClassVar[MemberRole]
MEMBER_ROLE_UNSPECIFIED: MemberRole
MEMBER_ROLE_DATA: MemberRole
MEMBER_ROLE_RELAY: MemberRole

class Credential(_message.Message):
    __slots__ = ("role", "public_key", "expires_s", "signature", "issuer")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ISSUER_FIELD_NUMBER: _ClassVar[int]
    role: MemberRole
    public_key: bytes
    expires_s: int
    signature: bytes
    issuer: Issuer
    def __init__(self, role: _Optional[_Union[MemberRole, str]] = ..., public_key: _Optional[bytes] = ..., expires_s: _Optional[int] = ..., signature: _Optional[bytes] = ..., issuer: _Optional[_Union[Issuer, _Mapping]] = ...) -> None: ...

class Issuer(_message.Message):
    __slots__ = ("public_key", "expires_s", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    expires_s: int
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., expires_s: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("kind", "body", "credential", "signature")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    body: bytes
    credential: Credential
    signature: bytes
    def __init__(self, kind: _Optional[str] = ..., body: _Optional[bytes] = ..., credential: _Optional[_Union[Credential, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...
