"""What an operator's requests meet before they reach a node: settings, and pauses.

It lasts as long as the daemon, over all lives of its node.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from decod.config.node_config import NodeConfig
from decod.config.node_settings import (
    SETTINGS,
    UNSET,
    Setting,
    given_in,
    parse_setting,
    with_values,
)
from decod.config.settings_file import SETTINGS_FILE, read_settings, write_settings
from decod.daemon.device_owner import HostDevice
from decod.daemon.frontend import Frontend
from decod.daemon.pausing.keeper import Pausable, Pausing
from decod.errors import ConfigError
from decod.journal.logs import log_note
from decod.net.rate_caps import Pace, Paces
from decod.train.checkpoint.places import DiskRoom

_log = logging.getLogger("decod")

OPTION, FILE, DEFAULT = "option", "file", "default"
"""Origins of a value: the command line or a variable, the settings file, or nobody."""


class Caps:
    """The caps that all lives of a node share.

    Args:
        config: This host's choices.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.paces = Paces(
            Pace(config.upload_max_bytes_per_s), Pace(config.download_max_bytes_per_s)
        )
        self.disk = DiskRoom(config.state_dir, config.disk_max_bytes)

    def use(self, config: NodeConfig) -> None:
        """Go by the caps of a configuration from now on."""
        self.paces.upload.cap(config.upload_max_bytes_per_s)
        self.paces.download.cap(config.download_max_bytes_per_s)
        self.disk.cap(config.disk_max_bytes)


class Desk:
    """The settings and pauses of one daemon's node.

    Args:
        given: What the command line says.
        volunteers: Whether the node may be paused: it is no data node.
        pausing: Pauses the node; made if absent.

    Raises:
        ConfigError: The settings file can't be used.
    """

    def __init__(
        self, given: NodeConfig, *, volunteers: bool, pausing: Pausing | None = None
    ) -> None:
        self._volunteers = volunteers
        self._state_dir = given.state_dir
        self._kept = read_settings(given.state_dir)
        """The values in the settings file."""
        self._given = given_in(given)
        """The values of the command line, until somebody sets others."""
        self._at_start = frozenset(self._given)
        self.config = self._resolved(given)
        """This host's choices as they are now."""
        self.caps = Caps(self.config)
        self._pausing = pausing or Pausing(self.config)
        self._device: HostDevice | None = None
        """The node's in its present life."""

    def _resolved(self, config: NodeConfig) -> NodeConfig:
        offered = {setting.name for setting in self._offered()}
        values = {**self._kept, **self._given}
        return with_values(config, {n: value for n, value in values.items() if n in offered})

    @contextmanager
    def of(self, node: Pausable, device: HostDevice) -> Iterator[None]:
        """Let settings and pauses reach this node and its device while the context lasts."""
        self._device = device
        try:
            with self._pausing.of(node, device):
                yield
        finally:
            self._device = None

    async def keep(self) -> None:
        """Pause and resume the node as schedule and rules say. Does not return at a volunteer."""
        if self._volunteers:
            await self._pausing.keep()

    async def answer(self, frontend: Frontend, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the operator, or have the node or its stand-in answer it."""
        command = request.get("command")
        if command == "set":
            return self._set(request)
        if not self._volunteers:
            return await frontend.answer(request)
        if command == "pause":
            return await self._pausing.person_pauses(request, frontend.answer)
        if command == "resume":
            return await self._pausing.person_resumes(request, frontend.answer)
        answer = await frontend.answer(request)
        return answer | {"pausing": self._pausing.describe()} if command == "status" else answer

    # --- settings -----------------------------------------------------------------------------

    def _set(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change all that a request names, or nothing; return what holds then.

        Raises:
            ConfigError: A name or a value is impossible (E-CFG-055, E-CFG-056), or the file can't
                be written (E-CFG-057).
        """
        asked = request.get("values")
        if asked:
            self._change(asked if isinstance(asked, dict) else {"": asked})
        return {
            "settings": [self._described(setting) for setting in self._offered()],
            "file": str(self._state_dir / SETTINGS_FILE),
        }

    def _change(self, asked: Mapping[str, Any]) -> None:
        offered = {setting.name for setting in self._offered()}
        changes: dict[str, Any] = {}
        for name, text in asked.items():
            if name not in offered:
                raise self._unknown(name)
            if text == UNSET:
                changes[name] = None
                continue
            # The file holds the value as it is shown. What can't be read back would keep the node
            # from starting again.
            shown = SETTINGS[name].show(parse_setting(name, str(text)))
            changes[name] = parse_setting(name, shown)
        kept = {**self._kept, **changes}
        kept = {name: value for name, value in kept.items() if value is not None}
        write_settings(self._state_dir, kept)
        self._kept = kept
        self._given = {name: v for name, v in self._given.items() if name not in changes}
        self.config = self._resolved(self.config)
        self.caps.use(self.config)
        self._pausing.use(self.config)
        if self._device is not None:
            self._device.use_threads(self.config.num_threads)
        log_note(_log, "settings.changed", {"names": ", ".join(changes)})

    def _offered(self) -> list[Setting]:
        return [s for s in SETTINGS.values() if self._volunteers or not s.for_volunteers]

    def _unknown(self, name: str) -> ConfigError:
        known = ", ".join(setting.name for setting in self._offered())
        if name in SETTINGS:
            why = "this is a data node, which can't be paused: every iteration waits for its data"
        else:
            why = "there is no setting of that name"
        return ConfigError(
            f"{name[:40]!r} can't be set here", why=why, fix=f"set {known}", code="E-CFG-055"
        )

    def _described(self, setting: Setting) -> dict[str, Any]:
        value = getattr(self.config, setting.field)
        if setting.name in self._given:
            origin = OPTION
        else:
            origin = FILE if setting.name in self._kept else DEFAULT
        return {
            "name": setting.name,
            "value": setting.default if value is None else setting.show(value),
            "origin": origin,
            "option": setting.option,
            "counts": setting.counts,
            # A restart with the same command line uses the option's value again.
            "option_returns": setting.name in self._at_start and origin != OPTION,
        }
