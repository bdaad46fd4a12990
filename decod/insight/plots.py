"""Plots of a report, drawn with matplotlib if that is installed."""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from decod.errors import ConfigError
from decod.insight.analysis_report import RunReport, Selection
from decod.installation import install_hint
from decod.journal.records import HostRow, RoundRow
from decod.texts import why_of

_SIZE_INCHES = (9.0, 4.5)
_PARTS = (
    *("data_s", "forward_s", "backward_s", "unsplit_s"),
    *("accumulate_s", "averaging_compute_s", "optimizer_s"),
)


def check_plots(folder: Path) -> None:
    """Check that plots can be drawn and written to a folder. Create the folder.

    Raises:
        ConfigError: matplotlib is not installed (E-CFG-064), or the folder is unfit (E-CFG-065).
    """
    _figure_class()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unfit(folder, error) from error


def _unfit(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write plots to {path}",
        why=why_of(error),
        fix="give another folder with --plots",
        code="E-CFG-065",
    )


def _figure_class() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError(
            "cannot draw plots",
            why="matplotlib is not installed",
            fix=f"{install_hint('plot')}, or leave --plots out",
            code="E-CFG-064",
        ) from None


def draw_plots(selection: Selection, report: RunReport, folder: Path) -> list[Path]:
    """Draw all plots; return the files. See `decod analyse --help`.

    Raises:
        ConfigError: A file cannot be written (E-CFG-065).
    """
    drawn = [
        _drawn(folder / "causes.png", lambda panel: _causes(panel, report)),
        _drawn(folder / "peers.png", lambda panel: _peers(panel, selection)),
        _drawn(folder / "rounds.png", lambda panel: _rounds(panel, selection.rounds)),
        _drawn(folder / "changes.png", lambda panel: _changes(panel, report)),
    ]
    if selection.hosts:
        drawn.append(_drawn(folder / "network.png", lambda panel: _network(panel, selection.hosts)))
    return drawn


def _drawn(path: Path, draw: Callable[[Any], None]) -> Path:
    # Unlike pyplot's, this figure has no window and no shared state.
    figure = _figure_class()(figsize=_SIZE_INCHES, layout="constrained")
    draw(figure.subplots())
    try:
        figure.savefig(path)
    except OSError as error:
        raise _unfit(path, error) from error
    return path


def _causes(panel: Any, report: RunReport) -> None:
    shown = {cause: seconds for cause, seconds in report.causes.items() if seconds > 0}
    panel.barh([cause.value for cause in shown], list(shown.values()))
    panel.invert_yaxis()
    panel.set_xlabel("seconds of a round")
    panel.set_title("What takes time in a round")


def _changes(panel: Any, report: RunReport) -> None:
    panel.barh([each.what for each in report.changes], [100 * each.gain for each in report.changes])
    panel.invert_yaxis()
    panel.set_xlabel("predicted gain in samples per second, %")
    panel.set_title("What to change, one at a time")


def _peers(panel: Any, selection: Selection) -> None:
    names = selection.names
    left = [0.0] * len(names)
    for part in _PARTS:
        rows = [[row for row in selection.rows if row.name == name] for name in names]
        means = [sum(getattr(r, part) or 0.0 for r in each) / len(each) for each in rows]
        panel.barh(names, means, left=left, label=part.removesuffix("_s").replace("_", " "))
        left = [a + b for a, b in zip(left, means, strict=True)]
    waits = [max(0.0, selection.round_s - busy) for busy in left]
    panel.barh(names, waits, left=left, color="0.9", label="no work")
    panel.invert_yaxis()
    panel.set_xlabel("seconds of a round")
    panel.set_title("Work of each peer")
    panel.legend(fontsize="small")


def _rounds(panel: Any, rounds: Sequence[Sequence[RoundRow]]) -> None:
    numbers = [rows[0].round for rows in rounds]
    panel.plot(numbers, [max(row.round_s for row in rows) for rows in rounds], label="round")
    panel.plot(
        numbers,
        [max(row.averaging_s or 0.0 for row in rows) for rows in rounds],
        label="averaging",
    )
    panel.set_xlabel("round")
    panel.set_ylabel("seconds")
    panel.set_ylim(bottom=0)
    panel.set_title("Length of rounds")
    panel.legend(fontsize="small")


def _network(panel: Any, hosts: Sequence[HostRow]) -> None:
    begin_s = hosts[0].time_s
    for name in dict.fromkeys(row.name for row in hosts):
        rows = [row for row in hosts if row.name == name and row.interval_s]
        rates = [(row.network_sent_bytes or 0) / row.interval_s / 1e6 for row in rows]
        panel.plot([row.time_s - begin_s for row in rows], rates, label=name)
    panel.set_xlabel("seconds")
    panel.set_ylabel("sent, MB/s")
    panel.set_title("Network of each host")
    panel.legend(fontsize="small")
