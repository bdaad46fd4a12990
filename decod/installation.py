"""How decod was installed on this host, and therefore how it is updated and extended."""

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlparse

DISTRIBUTION = "decod-train"
"""Name of decod's package. `decod` on PyPI is another project's, so no text may advise it."""

SCRIPT_MARK = ".installed-by-decod"
"""A file beside the environment that `scripts/install.sh` has made."""


IMAGE_MARK = ".decod-image"
"""A file in the environment of decod's container image."""


class InstalledBy(StrEnum):
    """A way to install decod."""

    SOURCE = "source"
    """From a folder with its source, which stays in use."""
    SCRIPT = "script"
    """By `scripts/install.sh`."""
    UV_TOOL = "uv tool"
    """By `uv tool install`."""
    UVX = "uvx"
    """For one call, by `uvx`."""
    PIPX = "pipx"
    CONTAINER = "container"
    """As a part of a container's image."""
    PIP = "pip"
    """Into an environment, by pip or uv."""


@dataclass(frozen=True, slots=True)
class Installation:
    """How decod was installed."""

    way: InstalledBy
    place: Path
    """The folder of the source, or of the environment."""

    @property
    def update(self) -> str:
        """How to get a newer release, for people."""
        return {
            InstalledBy.SOURCE: f"`git pull` in {self.place}, then {self.repair()}",
            InstalledBy.SCRIPT: "run the line again with which decod was installed",
            InstalledBy.UV_TOOL: f"`uv tool upgrade {DISTRIBUTION}`",
            InstalledBy.UVX: f"`uvx {DISTRIBUTION}@latest`",
            InstalledBy.PIPX: f"`pipx upgrade {DISTRIBUTION}`",
            InstalledBy.CONTAINER: "pull or build a newer image",
            InstalledBy.PIP: f"`{self._pip} install --upgrade {DISTRIBUTION}`",
        }[self.way]

    def repair(self, extra: str = "") -> str:
        """Return how to install a missing package, for people.

        Args:
            extra: The package's group of optional packages. Empty: decod always needs the package.
        """
        what = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
        source = f"'{self.place}[{extra}]'" if extra else str(self.place)
        return {
            InstalledBy.SOURCE: f"`{self._pip} install -e {source}`",
            InstalledBy.SCRIPT: f"run the install script again with `--from {what}`",
            InstalledBy.UV_TOOL: f"`uv tool install --force {what}`",
            InstalledBy.UVX: f"`uvx --from {what} {DISTRIBUTION}`",
            InstalledBy.PIPX: f"`pipx install --force {what}`",
            InstalledBy.CONTAINER: f"build an image with {what}",
            InstalledBy.PIP: f"`{self._pip} install {what}`",
        }[self.way]

    @property
    def _pip(self) -> str:
        return f"{sys.executable} -m pip"


def find_installation(prefix: Path | None = None, direct_url: str | None = None) -> Installation:
    """Return how this decod was installed.

    Args:
        prefix: The environment. None: this process's.
        direct_url: What pip notes of packages that are from no index, as JSON. None: what it has
            noted of decod.
    """
    prefix = prefix or Path(sys.prefix)
    source = _source_of(direct_url if direct_url is not None else _noted())
    if source is not None:
        return Installation(InstalledBy.SOURCE, source)
    for way, mark in (
        (InstalledBy.SCRIPT, prefix.parent / SCRIPT_MARK),
        (InstalledBy.UV_TOOL, prefix / "uv-receipt.toml"),
        (InstalledBy.PIPX, prefix / "pipx_metadata.json"),
        (InstalledBy.CONTAINER, prefix / IMAGE_MARK),
    ):
        if mark.exists():
            return Installation(way, prefix)
    # uv keeps environments for single calls in its cache.
    in_cache = any(each.name.startswith("archive-v") for each in prefix.parents)
    return Installation(InstalledBy.UVX if in_cache else InstalledBy.PIP, prefix)


def install_hint(extra: str = "") -> str:
    """Return how to install a missing package here. See `Installation.repair`."""
    return find_installation().repair(extra)


def _noted() -> str:
    try:
        return metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return ""


def _source_of(direct_url: str) -> Path | None:
    """Return the folder of the source that is in use; None if a copy was installed."""
    try:
        noted = json.loads(direct_url or "{}")
        if noted.get("dir_info", {}).get("editable"):
            return Path(unquote(urlparse(str(noted["url"])).path))
    except (ValueError, AttributeError, KeyError):
        pass  # Another tool's form: it was not installed for work on it.
    return None
