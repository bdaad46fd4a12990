"""Types of options that several commands share. A wrong value is a usage error: exit code 2."""

from typing import Any

import click
from typing_extensions import override

from decod.config.node import parse_listen
from decod.errors import ConfigError


class AddressType(click.ParamType[tuple[str, int]]):
    """`HOST:PORT`, with IPv6 in brackets; gives `(host, port)`."""

    name = "host:port"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        try:
            return parse_listen(str(value))
        except ConfigError as error:
            self.fail(f"{error.what}: {error.why}; {error.fix}", param, ctx)


class AutoOrCount(click.ParamType[int | None]):
    """`auto`, which gives None, or a whole number of at least `minimum`."""

    name = "auto|n"

    def __init__(self, *, minimum: int) -> None:
        self._minimum = minimum

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        text = str(value)
        if text == "auto":
            return None
        if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < self._minimum:
            self.fail(f"{text!r} is neither auto nor a number from {self._minimum}", param, ctx)
        return int(text)


class LatestOrIteration(click.ParamType[int]):
    """`latest`, which gives 0, or an iteration, from 1."""

    name = "latest|iteration"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text == "latest":
            return 0
        if not (text.isascii() and text.isdecimal()) or len(text) > 15 or int(text) < 1:
            self.fail(f"{text!r} is neither latest nor an iteration from 1", param, ctx)
        return int(text)


ADDRESS = AddressType()
