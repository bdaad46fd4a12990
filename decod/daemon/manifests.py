"""Manifests of the runs that this host has joined, so that a changed run can be told from another.

A join string names its run's manifest by the beginning of a hash only. A host that has seen that
manifest can say what is different now; one that has not can only say that something is.
"""

import os
from contextlib import suppress
from pathlib import Path

from decod.config.schema import MANIFEST_SIZE_MAX_BYTES, Manifest
from decod.errors import DecodError
from decod.files import read_beginning

KEPT_MAX = 16
"""Files; the oldest goes first."""

_PREFIX_LENGTH = 16


class KnownManifests:
    """Files in the folder `manifests` of a state folder, which need not exist.

    They only serve messages: what can't be read is as if it were not there.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "manifests"

    def keep(self, manifest: Manifest) -> None:
        """Remember a manifest."""
        path = self._path(manifest.sha256)
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(manifest.to_json(), encoding="utf-8")
            new.replace(path)
            others = set(self._folder.glob("*.json")) - {path}
            for old in sorted(others, key=os.path.getmtime)[: max(0, len(others) + 1 - KEPT_MAX)]:
                old.unlink()

    def find(self, prefix: str) -> Manifest | None:
        """Return the manifest whose hash begins like this, if it has been kept."""
        try:
            text = read_beginning(self._path(prefix), MANIFEST_SIZE_MAX_BYTES + 1)
            manifest = Manifest.from_json(text)
        except (OSError, ValueError, DecodError):
            return None
        return manifest if manifest.sha256.startswith(prefix) else None

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256[:_PREFIX_LENGTH]}.json"
