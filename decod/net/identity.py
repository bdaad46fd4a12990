"""This node's identity: a key file that is made at the first start, and the names derived from it.

At present the key is 32 random bytes that prove nothing to a peer. The id is a hash of a stand-in
for the key's public half, so ids keep their form when links become authenticated.
"""

import base64
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path

from decod.errors import ConfigError
from decod.files import open_ordinary
from decod.ids import NodeId

KEY_FILE = "identity.key"
_KEY_SIZE_BYTES = 32


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


@dataclass(frozen=True, slots=True)
class HostKey:
    """The id and the readable name of a node."""

    node_id: NodeId
    name: str
    """Two words derived from the id, for people. Not unique."""


def load_or_create_identity(state_dir: Path) -> HostKey:
    """Return the identity kept in `state_dir`. At the first start, make the folder and a key.

    Raises:
        ConfigError: The key file can't be read or written (E-CFG-030), other users may read it
            (E-CFG-031), or it does not hold a key (E-CFG-032).
    """
    path = state_dir / KEY_FILE
    try:
        key = _read_key(path)
    except FileNotFoundError:
        key = _create_key(path)
    return identity_of(key)


def identity_of(key: bytes) -> HostKey:
    """Return the identity that belongs to a key of 32 bytes."""
    # Stands for the public half: the key itself must not be hashed into what everybody sees.
    public = hashlib.sha256(b"decod-identity-public" + key).digest()
    node_id = NodeId(base64.b32encode(hashlib.sha256(public).digest()).decode().rstrip("=").lower())
    return HostKey(node_id, name_of(node_id))


def name_of(node_id: NodeId) -> str:
    """Return two words for a node id, joined by a hyphen: a-z, at most 32 characters."""
    digest = hashlib.sha256(node_id.encode()).digest()
    return f"{_ADJECTIVES[digest[0] % 64]}-{_NOUNS[digest[1] % 64]}"


def _read_key(path: Path) -> bytes:
    try:
        with open_ordinary(path) as descriptor:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            key = os.read(descriptor, _KEY_SIZE_BYTES + 1)
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
    if len(key) != _KEY_SIZE_BYTES:
        size = "more than 32" if len(key) > _KEY_SIZE_BYTES else str(len(key))
        raise ConfigError(
            f"{path} has {size} bytes",
            why="a key has 32",
            fix="restore it from a copy, or delete it to become a new node",
            code="E-CFG-032",
        )
    return key


def _create_key(path: Path) -> bytes:
    """Make a key file and return the key. If another process is quicker, return that one's key."""
    key = secrets.token_bytes(_KEY_SIZE_BYTES)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(key)
                file.flush()
                os.fsync(file.fileno())
            # A link appears whole or not at all, and fails if there is a key already.
            os.link(draft, path)
        finally:
            draft.unlink()
    except FileExistsError:
        return _read_key(path)
    except OSError as error:
        raise _unusable(path, error) from error
    return key


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} can't be used: {error.strerror}",
        why="this node's identity is kept there",
        fix="make its folder one that you may write, or name another with --state-dir",
        code="E-CFG-030",
    )
