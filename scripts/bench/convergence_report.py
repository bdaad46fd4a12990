"""Table and plot of a comparison of convergence.

A percentage of loss misleads: near the end of a training, a percent may be a third of all
iterations. So a method is worth the iterations of all-reduce that come to the same loss, with a
schedule of that length, and the time until then over links of some rates.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.convergence import NUM_REPLICAS

SMOOTHING = 25
"""Iterations for each point of the plot."""

LINKS_MBIT = (20, 100, 1000)
"""Rates of each member's uplink, in Mbit/s."""

SLOW = 100
"""A link that is so slow that gradients take as long as so many iterations."""

ALL_REDUCE = "all-reduce"

Result = dict[str, Any]
"""One training: settings, sizes, and losses."""


def loss_of(result: Result) -> float:
    """Return the loss at the end on tokens that nobody has trained on."""
    return float(result["held_out"][str(result["settings"]["num_iterations"])])


def sent_bytes(result: Result) -> float:
    """Return what a member sends for one average: parts of its own, and means of its part."""
    return float(result["average_bytes"]) * (NUM_REPLICAS - 1) / NUM_REPLICAS


def iteration_s(result: Result) -> float:
    """Return how long a replica computes in an iteration."""
    num_iterations = int(result["settings"]["num_iterations"])
    return float(result["seconds"]) / (NUM_REPLICAS * num_iterations)


def duration_s(result: Result, compute_s: float, mbit: float) -> float:
    """Return how long a training takes whose members have such links.

    Args:
        result: The training.
        compute_s: Of an iteration.
        mbit: Rate of each uplink, in Mbit/s.
    """
    settings = result["settings"]
    every, delay = settings["sync.every"], result["delay"]
    travel_s = sent_bytes(result) * 8 / (mbit * 1e6)
    # Members train on for the delay, and wait for what takes longer.
    phase_s = every * compute_s + max(0.0, travel_s - delay * compute_s)
    return float(settings["num_iterations"] / every * phase_s)


def equivalent(loss: float, references: Mapping[int, float]) -> float:
    """Return how many iterations of all-reduce come to a loss.

    Args:
        loss: The loss.
        references: All-reduce's losses, by the length of its training. Between them, and beyond, a
            loss is taken as linear in the logarithm of the length.
    """
    points = sorted(references.items())
    if len(points) < 2:
        return math.nan
    segments = [*pairwise(points)]
    (short, high), (long, low) = next(
        (each for each in segments if each[1][1] <= loss <= each[0][1]),
        segments[0] if loss > points[0][1] else segments[-1],
    )
    share = (high - loss) / (high - low)
    return math.exp(math.log(short) + share * math.log(long / short))


def table(results: Sequence[Result]) -> str:
    """Return the results as a table in Markdown."""
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result["method"], []).append(result)
    losses = {name: fmean(map(loss_of, each)) for name, each in by_method.items()}
    references = {
        each[0]["settings"]["num_iterations"]: losses[name]
        for name, each in by_method.items()
        if name.startswith(ALL_REDUCE)
    }
    if not results or ALL_REDUCE not in by_method:
        return "all-reduce is not trained yet"
    whole = by_method[ALL_REDUCE][0]
    length = whole["settings"]["num_iterations"]
    compute_s = {name: fmean(map(iteration_s, each)) for name, each in by_method.items()}
    facts = whole["settings"]
    head = (
        f"{whole['num_parameters']:,} parameters, {length:,} iterations of "
        f"{facts['batch.num_data_nodes']} x {facts['batch.microbatch_size']} x "
        f"{facts['batch.sequence_length']} tokens"
    )
    titles = (
        *("method", "rates", "computes, ms", "MB sent for an average", "loss", "spread"),
        "iterations of all-reduce, of 100",
        *(f"progress at {mbit} Mbit/s" for mbit in LINKS_MBIT),
        f"progress where gradients take {SLOW} iterations",
    )
    rows = [titles, tuple("---" for _ in titles)]
    alone_s = compute_s[ALL_REDUCE]
    links = (*LINKS_MBIT, sent_bytes(whole) * 8 / (SLOW * alone_s) / 1e6)
    base = {mbit: duration_s(whole, alone_s, mbit) / length for mbit in links}
    for name, each in by_method.items():
        found = each[0]
        iterations = equivalent(losses[name], references)
        spread = max(map(loss_of, each)) - min(map(loss_of, each))
        rows.append(
            (
                name,
                _rates(found["settings"]),
                f"{1000 * compute_s[name]:.1f}",
                f"{sent_bytes(found) / 1e6:.3f}",
                f"{losses[name]:.4f}",
                f"{spread:.4f}" if each[1:] else "-",
                f"{100 * iterations / length:.0f}",
                *(
                    f"{iterations * base[mbit] / duration_s(found, compute_s[name], mbit):.2f}"
                    for mbit in links
                ),
            )
        )
    note = "Progress is that in a second, in multiples of all-reduce's."
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in rows), "", note])


def _rates(settings: dict[str, Any]) -> str:
    """Return the rates in a few words."""
    words = [f"lr {settings['optimizer.lr']:.2g}"]
    if settings["sync.method"] == "diloco":
        words.append(f"outer {settings['sync.outer_lr']} and {settings['sync.outer_momentum']}")
    return ", ".join(words)


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the losses of training over iterations, and over time at the slowest link.

    The file is a PNG or SVG.
    """
    import matplotlib as mpl

    mpl.use("agg")
    # The same results give the same file. Text stays text, so that the file is small.
    mpl.rcParams.update({"svg.hashsalt": "decod", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    figure, (over_iterations, over_time) = plt.subplots(
        1, 2, figsize=(11, 4.5), sharey=True, layout="constrained"
    )
    for result in results:
        losses = result["losses"]
        minutes = duration_s(result, iteration_s(result), LINKS_MBIT[0]) / len(losses) / 60
        points = [
            (end, sum(losses[end - SMOOTHING : end]) / SMOOTHING)
            for end in range(SMOOTHING, len(losses) + 1, SMOOTHING)
        ]
        ends, means = zip(*points, strict=True)
        over_iterations.plot(ends, means, label=result["method"], linewidth=1.2)
        over_time.plot([end * minutes for end in ends], means, linewidth=1.2)
    over_iterations.set_xlabel("iteration")
    over_iterations.set_ylabel(f"training loss, mean of {SMOOTHING} iterations")
    over_time.set_xlabel(f"minutes at {LINKS_MBIT[0]} Mbit/s")
    over_time.set_xscale("log")
    for axes in (over_iterations, over_time):
        axes.grid(alpha=0.3)
    over_iterations.legend()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
