"""Manifests of the runs that this host has joined, to explain why a run no longer fits.

A join string names its run's manifest only by the beginning of a hash. A host that has kept the
manifest can say what has changed. Another host can only say that the manifest differs.
"""

import os
from contextlib import suppress
from pathlib import Path

from decod.config.schema import MANIFEST_SIZE_MAX_BYTES, Manifest
from decod.errors import DecodError
from decod.files import read_beginning

KEPT_MAX = 16
"""Most files. The oldest is removed first."""

_PREFIX_LENGTH = 16


class KnownManifests:
    """The files in the folder `manifests` of a state folder, which need not exist.

    They only improve error messages, so a file that can't be read is treated as missing.
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
        """Return the manifest whose hash begins with `prefix`, if it has been kept."""
        try:
            text = read_beginning(self._path(prefix), MANIFEST_SIZE_MAX_BYTES + 1)
            manifest = Manifest.from_json(text)
        except (OSError, ValueError, DecodError):
            return None
        return manifest if manifest.sha256.startswith(prefix) else None

    def _path(self, sha256: str) -> Path:
        return self._folder / f"{sha256[:_PREFIX_LENGTH]}.json"
