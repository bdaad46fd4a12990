"""The figure of `decod lab plan run`: bars of the times, and the best layout as boxes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from decod.lab.cli.simulate_plot import check_plot, figure_class, save_figure

if TYPE_CHECKING:
    from decod.lab.planner.organisations.compare import Comparison
    from decod.lab.planner.organisations.forecast import Forecast

__all__ = ["check_plot", "draw_comparison"]

_PARTS: Final = {
    "compute_s": "compute",
    "communication_s": "links",
    "fill_s": "fill",
    "aggregation_s": "aggregation",
}
_COLORS: Final = {
    "relay": "tab:blue",
    "peer": "tab:blue",
    "server": "tab:orange",
    "frontal": "tab:orange",
    "backward": "tab:red",
    "client": "tab:green",
}
_NUM_HOSTS_DRAWN_MAX: Final = 16
"""Of a stage. More are counted in one box."""


def draw_comparison(comparison: "Comparison", path: Path) -> None:
    """Draw the times of all organisations, and the hosts of the best one's stages.

    Raises:
        ConfigError: The file cannot be written (E-CFG-065).
    """
    best = comparison.chosen[0]
    columns = len(best.stages)
    rows = max(min(len(stage.hosts), _NUM_HOSTS_DRAWN_MAX + 1) for stage in best.stages)
    figure = figure_class()(
        figsize=(6 + max(4.0, 1.5 * columns), max(4.0, 0.35 * rows + 1.5)), layout="constrained"
    )
    times, boxes = figure.subplots(1, 2, width_ratios=(6, max(4.0, 1.5 * columns)))
    _draw_times(times, comparison)
    _draw_layout(boxes, best)
    save_figure(figure, path)


def _draw_times(panel: Any, comparison: "Comparison") -> None:
    names = [
        f"{each.organisation}\n{each.variant}".replace(", ", "\n") for each in comparison.chosen
    ]
    bottoms = [0.0] * len(names)
    for key, label in _PARTS.items():
        values = [getattr(each.parts, key) for each in comparison.chosen]
        panel.bar(range(len(names)), values, 0.6, bottom=bottoms, label=label)
        bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
    panel.set_xticks(range(len(names)), names, fontsize="small")
    panel.set_ylabel("seconds of an iteration, predicted")
    panel.legend(fontsize="small")


def _draw_layout(panel: Any, best: "Forecast") -> None:
    for column, stage in enumerate(best.stages):
        hosts = [
            (f"{host.host_id}: {host.num_microbatches}", _COLORS[host.duty])
            for host in stage.hosts[:_NUM_HOSTS_DRAWN_MAX]
        ]
        if len(stage.hosts) > _NUM_HOSTS_DRAWN_MAX:
            hosts.append((f"and {len(stage.hosts) - _NUM_HOSTS_DRAWN_MAX} more", "tab:gray"))
        for row, (text, color) in enumerate(hosts):
            box = {"boxstyle": "round", "facecolor": color, "alpha": 0.35}
            # Ids are not mathematics, though they may hold dollar signs.
            panel.text(
                column, -row, text, ha="center", va="center", fontsize="small", bbox=box,
                parse_math=False,
            )  # fmt: skip
    panel.set_xticks(
        range(len(best.stages)),
        [f"stage {k}\n{stage.num_layers} layers" for k, stage in enumerate(best.stages, 1)],
    )
    panel.set_yticks([])
    panel.set_xlim(-0.7, len(best.stages) - 0.3)
    panel.set_ylim(
        0.7 - max(len(stage.hosts[: _NUM_HOSTS_DRAWN_MAX + 1]) for stage in best.stages), 0.7
    )
    duties = " ".join(dict.fromkeys(host.duty for s in best.stages for host in s.hosts))
    panel.set_title(f"best: {best.organisation} ({duties}: microbatches)", fontsize="medium")
