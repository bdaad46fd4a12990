"""Manifests with values that decod would not write."""

import json

from decod.config.schema import Manifest


def changed(manifest: Manifest, path: str, value: object) -> str:
    """Return the canonical text of a manifest with one value put in, whatever it is.

    Args:
        manifest: The manifest.
        path: Of the value, such as `run.seed`.
        value: What takes its place.
    """
    values = json.loads(manifest.to_json())
    *tables, name = path.split(".")
    table = values
    for key in tables:
        table = table[key]
    table[name] = value
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
