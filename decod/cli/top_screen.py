"""Draws the run on a terminal and reacts to keys, until one of them or a signal ends it.

A thread asks the node, so a node that hangs holds up neither the keys nor the drawing.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from decod.cli.status_command import Status, known_status
from decod.cli.top_keys import TerminalKeys, end_by
from decod.cli.top_state import Curves, TopState, Wish, is_paused
from decod.cli.top_view import Scene, Size, render_top
from decod.errors import DecodError
from decod.exit_codes import ExitCode

INTERVAL_S = 1.0
"""Time between an answer of the node and the next question."""

_REDRAW_S = 5.0
"""The picture is drawn again after this time, even if nothing has come."""

Ask = Callable[[dict[str, Any]], dict[str, Any]]


class Watch:
    """What the node tells. A thread asks for that about once a second.

    Args:
        ask: Sends the node a request, and returns its answer. May wait for some seconds.

    Raises:
        DecodError: No node answers, or it is of another release.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask, self._ended = ask, threading.Event()
        self.scene = Scene(self._status(), self._curves(Curves()))
        """The newest that is known."""
        self.notice: str | None = None
        """The answer to the last request to pause or resume; None once it is shown."""
        self.on_news: Callable[[], None] = lambda: None
        """Called in another thread when `scene` or `notice` has changed."""
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def request(self, command: str) -> None:
        """Have the node pause or resume. It may take some seconds: `notice` tells the end."""
        threading.Thread(target=self._request, args=(command,), daemon=True).start()

    def _request(self, command: str) -> None:
        try:
            self._ask({"command": command})
        except DecodError as error:
            self.notice = f"{error.what}: {error.why}"
        else:
            self.notice = f"the node has agreed to {command}"
        self.on_news()

    def _keep_asking(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            last = self.scene
            try:
                self.scene = Scene(self._status(), self._curves(last.curves))
            except DecodError as error:
                self.scene = Scene(last.status, last.curves, f"{error.what}: {error.why}")
            self.on_news()

    def _status(self) -> Status:
        return known_status(self._ask({"command": "status"}))

    def _curves(self, earlier: Curves) -> Curves:
        # A node of an earlier release does not know its history.
        with suppress(DecodError):
            return earlier.after(self._ask(earlier.request))
        return earlier


def show(ask: Ask, console: Console) -> int:
    """Draw the run until a key or a signal ends it; return the exit code.

    Args:
        ask: As for `Watch`.
        console: On a terminal.

    Raises:
        DecodError: No node answers at first, or it is of another release.
    """
    watch, state, keys = Watch(ask), TopState(), TerminalKeys(sys.stdin.fileno())
    watch.on_news = keys.wake
    try:
        while True:
            number = _until_signal(watch, state, console, keys)
            if number is None or number == signal.SIGINT:
                return ExitCode.OK
            if number == signal.SIGTSTP:
                # The shell has the terminal until it lets this process go on.
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                end_by(number)
    finally:
        watch.close()


def _until_signal(
    watch: Watch, state: TopState, console: Console, keys: TerminalKeys
) -> int | None:
    """Draw until a signal comes; return its number, or None if a key has asked for the end."""
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    try:
        with keys, live:
            while not keys.signals:
                _draw(watch, state, console, live)
                for key in keys.wait(_REDRAW_S):
                    wish = state.press(key, paused=is_paused(watch.scene.status))
                    if wish is Wish.QUIT:
                        return None
                    if wish is not Wish.NOTHING:
                        state.notice = f"asking the node to {wish.value} ..."
                        watch.request(wish.value)
            return keys.signals[0]
    except (EOFError, OSError):
        # The terminal has gone.
        return signal.SIGHUP


def _draw(watch: Watch, state: TopState, console: Console, live: Live) -> None:
    if watch.notice is not None:
        state.notice, watch.notice = watch.notice, None
    # Rich would go by COLUMNS and LINES, which do not follow the terminal's size.
    width, height = os.get_terminal_size(sys.stdout.fileno())
    console.size = ConsoleDimensions(width, height)
    live.update(render_top(watch.scene, state, Size(width, height)), refresh=True)
