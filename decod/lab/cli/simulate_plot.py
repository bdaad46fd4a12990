"""Figures of `decod lab simulate --paper`, drawn with matplotlib if that is installed.

Other commands that draw share its checks.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from decod.errors import ConfigError
from decod.installation import install_hint
from decod.paths import absolute_path

if TYPE_CHECKING:
    from decod.lab.sim.paper import Row

SUFFIXES: Final = (".png", ".svg")
_PANEL_WIDTH_INCHES: Final = 5.0
_HEIGHT_INCHES: Final = 4.0


def check_plot(path: Path) -> None:
    """Check that a plot can be drawn and written to `path`.

    Raises:
        ConfigError: matplotlib is not installed (E-CFG-064), or the path is unfit (E-CFG-065).
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"--plot is {str(path)!r}",
            why="the suffix says which kind of picture to write",
            fix=f"end the name with one of {', '.join(SUFFIXES)}",
            code="E-CFG-065",
        )
    if not absolute_path(path).parent.is_dir():
        raise ConfigError(
            f"--plot is {str(path)!r}",
            why="there is no such folder",
            fix="create it, or give another path",
            code="E-CFG-065",
        )
    figure_class()


def figure_class() -> Any:
    """Return matplotlib's figure, which has no window and no shared state, unlike pyplot's.

    Raises:
        ConfigError: matplotlib is not installed (E-CFG-064).
    """
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError(
            "cannot draw a plot",
            why="matplotlib is not installed",
            fix=f"{install_hint('plot')}, or leave --plot out",
            code="E-CFG-064",
        ) from None


def draw_plot(paper: str, rows: Sequence["Row"], path: Path) -> None:
    """Draw one panel of bars for each metric, settings side by side, a bar for each policy.

    Raises:
        ConfigError: The file cannot be written (E-CFG-065).
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    figure = figure_class()(
        figsize=(_PANEL_WIDTH_INCHES * len(metrics), _HEIGHT_INCHES), layout="constrained"
    )
    figure.suptitle(paper)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        _draw_panel(panel, metric, [row for row in rows if row.metric == metric])
    # Not every panel shows all policies, so take the legend of the fullest.
    fullest = max(panels, key=lambda panel: len(panel.get_legend_handles_labels()[1]))
    fullest.legend(fontsize="small")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure.

    Raises:
        ConfigError: The file cannot be written (E-CFG-065).
    """
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}",
            why=error.strerror or type(error).__name__,
            fix="give another path",
            code="E-CFG-065",
        ) from None


def _draw_panel(panel: Any, metric: str, rows: Sequence["Row"]) -> None:
    settings = list(dict.fromkeys(row.setting for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    width = 0.8 / len(policies)
    for index, policy in enumerate(policies):
        mine = [row for row in rows if row.policy == policy]
        places = [settings.index(row.setting) + (index + 0.5) * width - 0.4 for row in mine]
        means, spreads = [row.mean for row in mine], [row.stdev for row in mine]
        panel.bar(places, means, width, yerr=spreads, capsize=2, label=policy)
        given = [(place, row.paper) for place, row in zip(places, mine, strict=True) if row.paper]
        if given:
            panel.plot(*zip(*given, strict=True), "k_", markersize=12, label=f"{policy}, paper")
    panel.set_xticks(range(len(settings)), settings)
    panel.set_xlabel("setting")
    panel.set_title(metric.replace("_", " "))
