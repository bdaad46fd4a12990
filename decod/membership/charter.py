"""The charter of a run: a data node's word that a run and its manifest belong together.

A join string names only the root, since a run that is resumed has another id and another manifest.
The charter ties both to the root. Every member passes it on, and nobody else can write one.
"""

import hashlib
import json

from decod.ids import RunId
from decod.membership.credential import Statement
from decod.membership.papers import Membership
from decod.protocol.core.view import Role
from decod.wire import validate

_KIND = "run"


def new_charter(founder: Membership, run_id: RunId, manifest_json: str) -> Statement:
    """Return the charter of a run that a data node founds.

    Args:
        founder: The data node's membership.
        run_id: The run.
        manifest_json: Its manifest as canonical JSON.
    """
    return founder.state(_KIND, _body(run_id, manifest_json))


def check_charter(charter: Statement, root: bytes, run_id: RunId, manifest_json: str) -> None:
    """Check that a run and its manifest belong to a root.

    Args:
        charter: The run's charter.
        root: The root's public key.
        run_id: The run.
        manifest_json: Its manifest as canonical JSON.

    Raises:
        MalformedMessageError: They do not, as far as the charter proves.
    """
    # It stays true after its author's membership has ended.
    author = charter.check(root, _KIND, now_s=None)
    if author.role is not Role.DATA or charter.body != _body(run_id, manifest_json):
        raise validate.malformed("charter", run_id, allowed="a data node's word for this run")


def _body(run_id: RunId, manifest_json: str) -> bytes:
    manifest_sha256 = hashlib.sha256(manifest_json.encode()).hexdigest()
    return json.dumps({"manifest_sha256": manifest_sha256, "run_id": run_id}).encode()
