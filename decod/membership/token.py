"""Join tokens: whoever holds one may become a member.

A token is a secret of 160 bits. It is the seed of an Ed25519 key, and its holder proves that it has
the key by signing a TLS certificate with it. So the secret itself is never sent. A data node keeps
only the public half, with which nobody can join.
"""

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from typing_extensions import override

from decod.protocol.core.view import Role
from decod.texts import base32

SECRET_SIZE_BYTES = 20
ID_LENGTH = 8


@dataclass(frozen=True)
class Token:
    """A join token, as its holder has it. Do not log it."""

    role: Role
    """The role in which its holder may join."""
    secret: bytes

    @staticmethod
    def new(role: Role) -> "Token":
        """Return a token that nobody else has."""
        return Token(role, secrets.token_bytes(SECRET_SIZE_BYTES))

    @override
    def __repr__(self) -> str:
        return f"Token({self.role}, {self.id})"

    @cached_property
    def key(self) -> Ed25519PrivateKey:
        """The key of which the secret is the seed. It differs for each role."""
        seed = b"decod token 1\0" + self.role.value.encode() + b"\0" + self.secret
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed).digest())

    @cached_property
    def public(self) -> bytes:
        """The public half of the key."""
        return self.key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @cached_property
    def id(self) -> str:
        """A short name, which is no secret."""
        return id_of(self.public)


def id_of(public: bytes) -> str:
    """Return the id of the token with this public key."""
    return base32(hashlib.sha256(public).digest())[:ID_LENGTH]
