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
    origin: str = ""
    """URL of the wheel or folder that was installed; empty if an index had it."""

    @property
    def update(self) -> str:
        """How to get a newer release, for people."""
        newer = "get the newer source or wheel, then "
        return {
            InstalledBy.SOURCE: f"`git pull` in {self.place}, then {self.repair()}",
            InstalledBy.SCRIPT: "run the line again with which decod was installed",
            InstalledBy.CONTAINER: "pull or build a newer image",
        }.get(self.way) or (newer if self.origin else "") + self.repair()

    def repair(self, extra: str = "") -> str:
        """Return how to install decod again, and with it a package that is missing, for people.

        Args:
            extra: The package's group of optional packages. Empty: decod always needs the package.
        """
        name = f"{DISTRIBUTION}[{extra}]" if extra else DISTRIBUTION
        what = f"'{name} @ {self.origin}'" if self.origin else f"'{name}'"
        source = f"'{self.place}[{extra}]'" if extra else f"'{self.place}'"
        pip = f"{sys.executable} -m pip install"
        return {
            InstalledBy.SOURCE: f"`{pip} -e {source}`",
            InstalledBy.SCRIPT: f"run the install script again with `--from {what}`",
            InstalledBy.UV_TOOL: f"`uv tool install --force --upgrade {what}`",
            InstalledBy.UVX: f"`uvx --refresh --from {what} {DISTRIBUTION}`",
            InstalledBy.PIPX: f"`pipx install --force {what}`",
            InstalledBy.CONTAINER: f"build an image with {what}",
            InstalledBy.PIP: f"`{pip} --upgrade {what}`",
        }[self.way]


def find_installation(prefix: Path | None = None, direct_url: str | None = None) -> Installation:
    """Return how this decod was installed.

    Args:
        prefix: The environment. None: this process's.
        direct_url: What pip notes of packages that are from no index, as JSON. None: what it has
            noted of decod.
    """
    prefix = prefix or Path(sys.prefix)
    origin, in_use = _origin(direct_url if direct_url is not None else _noted())
    if in_use:
        return Installation(InstalledBy.SOURCE, Path(unquote(urlparse(origin).path)))
    for way, mark in (
        (InstalledBy.SCRIPT, prefix.parent / SCRIPT_MARK),
        (InstalledBy.UV_TOOL, prefix / "uv-receipt.toml"),
        (InstalledBy.PIPX, prefix / "pipx_metadata.json"),
        (InstalledBy.CONTAINER, prefix / IMAGE_MARK),
    ):
        if mark.exists():
            return Installation(way, prefix, origin)
    # uv keeps environments for single calls in its cache.
    in_cache = any(each.name.startswith("archive-v") for each in prefix.parents)
    return Installation(InstalledBy.UVX if in_cache else InstalledBy.PIP, prefix, origin)


def install_hint(extra: str = "") -> str:
    """Return how to install a missing package here. See `Installation.repair`."""
    return find_installation().repair(extra)


def _noted() -> str:
    try:
        return metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or ""
    except metadata.PackageNotFoundError:
        return ""


def _origin(direct_url: str) -> tuple[str, bool]:
    """Return the URL from which decod was installed, and whether its files there are in use."""
    try:
        noted = json.loads(direct_url or "{}")
        return str(noted.get("url", "")), bool(noted.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return "", False  # Another tool's form.
