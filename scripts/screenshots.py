"""Makes the pictures of the documents anew: the page of a run, and `decod status` on a terminal.

    python scripts/screenshots.py

A leader and four relays train a tiny model on the loopback. One relay is killed on the way, and
another takes its place. The page is drawn, as wide as a phone, a tablet and a desktop, by the
system's Chromium (`apt-get install chromium`) through playwright, the terminal by rich. The
pictures go to docs/images/. Neither refers to anything outside of itself.
"""

import argparse
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import ViewportSize, sync_playwright
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.cli.status_view import render_status  # noqa: E402
from tests.support.cluster import Cluster, Daemon, takes_part  # noqa: E402
from tests.support.runs import make_run, prepare_corpus  # noqa: E402

_RELAYS = {"garage": 1, "attic": 1, "brave-otter": 2, "office": 2}
"""Names of relays, and the stages that they run."""

_NEWCOMER = "lantern"
"""The relay that comes when the last of them is killed."""

_NUM_ITERATIONS = 60
"""Iterations before a relay is killed, and then before the pictures are made: enough for curves."""

_TIMEOUT_S = 300.0
"""Longest that anything may take, on a machine that is busy with other things."""

_SCREENS: dict[str, ViewportSize] = {
    "page.png": {"width": 1600, "height": 1120},
    "page-900.png": {"width": 900, "height": 1200},
    "page-390.png": {"width": 390, "height": 844},
}
_COLUMNS = 100
_JOIN_STRING = "decod1-v-...@gpu.example.org:7700"
"""Shown in the place of the real one."""


def page_address(leader: Daemon) -> str | None:
    """Return the address of a leader's page, or None if it serves none yet."""
    served = leader.events("page.served")
    return str(served[-1]["url"]) if served else None


def draw_page(address: str, out: Path, chromium: str) -> None:
    """Draw a page as it stands on each screen, as PNG."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, screen in _SCREENS.items():
            tab = browser.new_page(viewport=screen, color_scheme="light")
            tab.goto(address)
            tab.wait_for_selector("#picture circle")
            tab.wait_for_selector("#loss-chart canvas")
            tab.screenshot(path=out / name)
            tab.close()
        browser.close()


def draw_status(leader: Daemon, path: Path) -> None:
    """Draw what `decod status` shows, as SVG."""
    status = leader.status() | {"join_string": _JOIN_STRING}
    console = Console(record=True, width=_COLUMNS, file=StringIO(), markup=False, highlight=False)
    console.print("$ decod status")
    console.print(render_status(status))
    drawn = console.export_svg(title="decod", theme=SVG_EXPORT_THEME)
    # Rich's template loads a font from another host. Any font of fixed width will do.
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    path.write_text(drawn.replace("Fira Code", "ui-monospace"), encoding="utf-8")


def draw_all(out: Path, chromium: str) -> None:
    """Train, lose a relay and get another, and draw the pictures into a folder."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        run = replace(make_run(), name="our-run")
        with Cluster(folder / "run", run, prepare_corpus(folder)) as cluster:
            run_file = cluster.run_file.read_text(encoding="utf-8")
            cluster.run_file.write_text(run_file.replace('prompts = ""', 'prompts = "The "'))
            leader = cluster.start_leader("--page", "127.0.0.1:0", name="kitchen")
            for relay, stage in _RELAYS.items():
                cluster.start_relay(relay, "--stage", str(stage))
            for daemon in cluster.daemons:
                entered = partial(takes_part, cluster, daemon)
                cluster.wait_for(entered, f"{daemon.name} in the run", timeout_s=_TIMEOUT_S)
            cluster.wait_for_iteration(leader.iteration + _NUM_ITERATIONS, timeout_s=_TIMEOUT_S)
            cluster.daemons[-1].send(signal.SIGKILL)
            newcomer = cluster.start_relay(_NEWCOMER, "--stage", "2")
            entered = partial(takes_part, cluster, newcomer)
            cluster.wait_for(entered, f"{_NEWCOMER} in the run", timeout_s=_TIMEOUT_S)
            cluster.wait_for_iteration(leader.iteration + _NUM_ITERATIONS, timeout_s=_TIMEOUT_S)
            draw_status(leader, out / "status.svg")
            address = cluster.wait_for(partial(page_address, leader), "the page")
            draw_page(address, out, chromium)


def main(arguments: Sequence[str]) -> int:
    """Draw the pictures; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs/images", help="folder of the pictures"
    )
    out: Path = parser.parse_args(arguments).out
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        print("no Chromium: apt-get install chromium", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    draw_all(out, chromium)
    for path in (out / "status.svg", *(out / name for name in _SCREENS)):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
