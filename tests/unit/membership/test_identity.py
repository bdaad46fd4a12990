"""The identity is made once, kept private, and refused when somebody else could have it."""

import base64
import hashlib
import re
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from decod.errors import ConfigError
from decod.membership.identity import (
    KEY_FILE,
    identity_of,
    load_or_create_identity,
    node_id_of,
    parse_identity,
)


def test_the_same_folder_gives_the_same_identity(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "state")
    assert load_or_create_identity(tmp_path / "state") == first
    assert load_or_create_identity(tmp_path / "other") != first
    assert re.fullmatch("[a-z2-7]{52}", first.node_id)
    assert re.fullmatch("[a-z]+-[a-z]+", first.name)
    assert len(first.name) <= 32


def test_the_key_is_private_and_nothing_else_is_left(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


# RFC 8032, section 7.1, test 1, and the SHA-256 of its public key in base32.
_SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def test_an_id_is_the_hash_of_the_public_key() -> None:
    found = identity_of(Ed25519PrivateKey.from_private_bytes(_SEED))
    assert found.public == _PUBLIC
    digest = hashlib.sha256(_PUBLIC).digest()
    assert found.node_id == node_id_of(_PUBLIC)
    assert base64.b32decode(found.node_id.upper() + "====") == digest


def test_a_node_signs_with_its_key() -> None:
    found = identity_of(Ed25519PrivateKey.generate())
    public = Ed25519PublicKey.from_public_bytes(found.public)
    public.verify(found.sign(b"a message"), b"a message")
    with pytest.raises(InvalidSignature):
        public.verify(found.sign(b"a message"), b"another")


def test_a_key_is_never_shown_by_accident() -> None:
    found = identity_of(Ed25519PrivateKey.from_private_bytes(_SEED))
    assert "Ed25519PrivateKey" not in repr(found)


def _foreign_keys() -> dict[str, bytes]:
    plain = (Encoding.PEM, PrivateFormat.PKCS8)
    key = Ed25519PrivateKey.generate()
    return {
        "nothing": b"",
        "raw": bytes(32),
        "long": bytes(100_000),
        "short": identity_of(key).to_pem()[:-40],
        "locked": key.private_bytes(*plain, BestAvailableEncryption(b"word")),
        "public": key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "p256": ec.generate_private_key(ec.SECP256R1()).private_bytes(*plain, NoEncryption()),
    }


@pytest.mark.parametrize("kind", [*_foreign_keys()])
def test_what_is_no_key_of_a_node_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"E-CFG-032 my\.key does not hold a node's key"):
        parse_identity(_foreign_keys()[kind], "my.key")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    load_or_create_identity(tmp_path)
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match=f"E-CFG-031.*{mode:04o}.*chmod 600"):
        load_or_create_identity(tmp_path)


@pytest.mark.parametrize("size", [0, 32, 100_000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / KEY_FILE
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="E-CFG-032"):
        load_or_create_identity(tmp_path)
    assert path.stat().st_size == size, "it is not replaced"


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(ConfigError, match="E-CFG-030"):
        load_or_create_identity(tmp_path)


def test_a_file_in_place_of_the_state_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")
    with pytest.raises(ConfigError, match="E-CFG-030"):
        load_or_create_identity(tmp_path / "state")
