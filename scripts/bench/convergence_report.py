"""Table and plot of a comparison of convergence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.convergence import PAPER_LOSSES

NUM_LAST = 50
"""Iterations over which the loss of training is averaged at the end."""

SMOOTHING = 25
"""Iterations for each point of the plot."""

Result = dict[str, Any]
"""One method's: settings, sizes, and losses so far."""

_HEAD = (
    "method",
    "settings",
    "bytes / iteration",
    "ratio",
    f"loss, last {NUM_LAST}",
    "held-out loss",
    "of all-reduce's",
    "paper, 1.3 B",
    "paper, 107 B",
)


def bytes_per_iteration(result: Result) -> float:
    """Return what a member's contribution and the average take of the wire, for each iteration."""
    return float(result["average_bytes"]) / float(result["settings"]["sync.every"])


def held_out(result: Result) -> float | None:
    """Return the loss at the end on tokens that nobody has trained on. None: not at the end."""
    found: float | None = result["held_out"].get(str(result["settings"]["num_iterations"]))
    return found


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    if not results:
        return "nothing is trained yet"
    base = next((result for result in results if result["method"] == "all-reduce"), None)
    rows = [_HEAD, tuple("---" for _ in _HEAD), *(_row(result, base) for result in results)]
    facts = results[0]["settings"]
    head = (
        f"{results[0]['num_parameters']:,} parameters, {facts['num_iterations']} iterations of "
        f"{facts['batch.num_data_nodes']} x {facts['batch.microbatch_size']} x "
        f"{facts['batch.sequence_length']} tokens, {facts['optimizer.schedule']} schedule, "
        f"warm-up {facts['optimizer.warmup_iterations']}"
    )
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in rows)])


def _row(result: Result, base: Result | None) -> tuple[str, ...]:
    losses, num_iterations = result["losses"], result["settings"]["num_iterations"]
    last = losses[-NUM_LAST:]
    loss, best = held_out(result), None if base is None else held_out(base)
    ratio = None if base is None else bytes_per_iteration(base) / bytes_per_iteration(result)
    if len(losses) < num_iterations:
        shown = f"at iteration {len(losses)}"
    else:
        shown = "-" if loss is None else f"{loss:.4f}"
    return (
        result["method"],
        _settings(result["settings"]),
        f"{bytes_per_iteration(result):,.0f}",
        "-" if ratio is None else f"{ratio:.1f}",
        f"{sum(last) / len(last):.4f}" if last else "-",
        shown,
        "-" if loss is None or best is None else f"{100 * (loss / best - 1):+.1f} %",
        *("-" if loss is None else f"{loss:.2f}" for loss in PAPER_LOSSES[result["method"]]),
    )


def _settings(settings: dict[str, Any]) -> str:
    """Return how averages are taken, in a few words."""
    compression = settings["sync.compression"]
    words = [f"H = {settings['sync.every']}"]
    if compression == "cocktail":
        words.append(f"random {settings['sync.random_ratio']}, top {settings['sync.top_ratio']}")
    else:
        words.append({"none": "float32"}.get(compression, compression))
    if compression.startswith("lowrank"):
        words.append(f"rank {settings['sync.rank']}")
    words.append(f"lr {settings['optimizer.lr']}")
    if settings["sync.method"] == "diloco":
        words.append("overlap" if settings["sync.overlap"] else "no overlap")
        words.append(f"outer {settings['sync.outer_lr']} / {settings['sync.outer_momentum']}")
    return ", ".join(words)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the losses of training over iterations, as PNG or SVG."""
    import matplotlib as mpl

    mpl.use("agg")
    # The same results give the same file. Text stays text, so that the file is small.
    mpl.rcParams.update({"svg.hashsalt": "decod", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for result in results:
        losses = result["losses"]
        points = [
            (end, sum(losses[end - SMOOTHING : end]) / SMOOTHING)
            for end in range(SMOOTHING, len(losses) + 1, SMOOTHING)
        ]
        axes.plot(*zip(*points, strict=True), label=result["method"], linewidth=1.2)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"training loss, mean of {SMOOTHING} iterations")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
