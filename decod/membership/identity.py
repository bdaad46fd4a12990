"""This node's identity: an Ed25519 key that is made at the first start, and the names behind it.

The key lies in the node's state folder, and is never sent. The node's id is the hash of its public
half, in base32. So an id fits one label of a domain name.
"""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from decod.errors import ConfigError
from decod.files import open_ordinary
from decod.ids import NodeId
from decod.texts import base32

KEY_FILE = "identity.key"
KEY_SIZE_MAX_BYTES = 1024
"""The largest size of a key file. An Ed25519 key in PEM has 119 bytes."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ADJECTIVES = _words(
    """
    agile amber ample azure brave brisk bright calm candid clear clever cobalt cosmic crisp
    curious daring deft dusky eager early fair fancy fast fleet fond frank fresh gentle glad
    golden grand green happy hardy hazel honest humble ivory jolly keen kind lively loyal lucid
    lunar mellow merry mild misty modest neat noble olive patient plain polar proud quick quiet
    rapid rosy sandy serene shy
    """
)
_NOUNS = _words(
    """
    badger beaver bison bobcat condor coral crane cricket curlew dingo dolphin eagle egret
    falcon ferret finch fox gannet gecko heron hornet ibex ibis jackal jaguar kestrel koala
    lemur linnet lizard lynx magpie marlin marmot marten merlin mole moose newt ocelot oriole
    osprey otter owl panda pelican petrel pigeon plover puffin python quail raven robin salmon
    seal shrew sparrow stork swift tapir toucan walrus wombat
    """
)
assert len(_ADJECTIVES) == len(_NOUNS) == 64


def _new_start() -> int:
    return secrets.randbelow(2**63 - 1) + 1  # 0 stands for a start that nobody has told.


@dataclass(frozen=True, slots=True)
class HostKey:
    """A node's key, and the id and the readable name that follow from it."""

    node_id: NodeId
    name: str
    """Two words derived from the id, for people. Not unique."""
    public: bytes
    """The public half of the key, 32 bytes."""
    private: Ed25519PrivateKey = field(repr=False, compare=False)
    start: int = field(default_factory=_new_start, repr=False, compare=False)
    """Drawn when a daemon loads the key, 63 bits: hosts with a copy of the key differ in it."""

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self.private.sign(message)

    def to_pem(self) -> bytes:
        """Return the whole key, as PKCS #8 in PEM. Whoever has it can act as this node."""
        return self.private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def load_or_create_identity(state_dir: Path, file: str = KEY_FILE) -> HostKey:
    """Return the identity kept in a file of `state_dir`. At first, make the folder and a key.

    Raises:
        ConfigError: The key file can't be read or written (E-CFG-030), other users may read it
            (E-CFG-031), or it does not hold a key (E-CFG-032).
    """
    try:
        return load_identity(state_dir, file)
    except FileNotFoundError:
        return keep_identity(state_dir, new_identity(), file)


def load_identity(state_dir: Path, file: str = KEY_FILE) -> HostKey:
    """Return the identity kept in a file of `state_dir`.

    Raises:
        FileNotFoundError: There is none yet.
        ConfigError: As in `load_or_create_identity`.
    """
    path = state_dir / file
    try:
        with open_ordinary(path) as descriptor:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            text = os.read(descriptor, KEY_SIZE_MAX_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(path, error) from error
    if mode & 0o077:
        raise ConfigError(
            f"{path} has mode {mode:04o}",
            why="others on this host can read it, and act as this node",
            fix=f"chmod 600 {path}, or delete it to become a new node",
            code="E-CFG-031",
        )
    return parse_identity(text, str(path))


def kept_identity(state_dir: Path) -> HostKey | None:
    """Return the identity kept in `state_dir`; None if there is none yet.

    Raises:
        ConfigError: As in `load_or_create_identity`.
    """
    with suppress(FileNotFoundError):
        return load_identity(state_dir)
    return None


def parse_identity(text: bytes, source: str) -> HostKey:
    """Return the identity in the bytes of a key file.

    Raises:
        ConfigError: They are no Ed25519 key in PEM (E-CFG-032). Names the source.
    """
    found = None
    if len(text) <= KEY_SIZE_MAX_BYTES:
        try:
            found = load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            found = None
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigError(
            f"{source} does not hold a node's key",
            why="a key is an Ed25519 key in PEM, without a password",
            fix="restore it from a copy, or delete it to become a new node",
            code="E-CFG-032",
        )
    return identity_of(found)


def new_identity() -> HostKey:
    """Return an identity that nobody else has. It is not kept."""
    return identity_of(Ed25519PrivateKey.generate())


def identity_of(key: Ed25519PrivateKey) -> HostKey:
    """Return the identity that belongs to a key."""
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    node_id = node_id_of(public)
    return HostKey(node_id, name_of(node_id), public, key)


def node_id_of(public: bytes) -> NodeId:
    """Return the id of the node whose key has this public half."""
    return NodeId(base32(hashlib.sha256(public).digest()))


def name_of(node_id: NodeId) -> str:
    """Return two words for a node id, joined by a hyphen: a-z, at most 32 characters."""
    digest = hashlib.sha256(node_id.encode()).digest()
    return f"{_ADJECTIVES[digest[0] % 64]}-{_NOUNS[digest[1] % 64]}"


def keep_identity(state_dir: Path, identity: HostKey, file: str = KEY_FILE) -> HostKey:
    """Keep an identity in a folder without one, and return it.

    If another process is quicker, return the identity that it has kept.

    Raises:
        ConfigError: As in `load_or_create_identity`.
    """
    path = state_dir / file
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_key(path, identity)
    except FileExistsError:
        return load_identity(state_dir, file)
    except OSError as error:
        raise _unusable(path, error) from error
    return identity


def write_key(path: Path, identity: HostKey) -> None:
    """Write a key to a new file, whole or not at all. Only its owner can read it.

    Raises:
        FileExistsError: The path leads to something already.
        OSError: The file can't be written.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.to_pem())
            file.flush()
            os.fsync(file.fileno())
        # A link appears whole or not at all, and fails if there is a file already.
        os.link(draft, path)
    finally:
        draft.unlink()


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} can't be used: {error.strerror}",
        why="a key is kept there, and can't be replaced",
        fix="make its folder one that you may write, or name another with --state-dir",
        code="E-CFG-030",
    )
