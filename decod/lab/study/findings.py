"""What the thesis has found, and whether it holds in other results.

Each finding is judged by pairs of results that differ in one thing. Differences below a tolerance
count as none.
"""

from collections.abc import Callable
from dataclasses import dataclass

from decod.lab.study.grid import LARGE_TARGET, LOAD_S, RATE, TARGET, Point
from decod.lab.study.results import ACCURACY_TOLERANCE, TIME_TOLERANCE, PointResult, Results


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a finding holds."""

    holds: bool | None
    """None: the results can't tell."""
    figures: str
    """What it was judged by."""


@dataclass(frozen=True, slots=True)
class ThesisFinding:
    """A finding of the thesis."""

    name: str
    text: str
    section: str
    judge: Callable[[Results], Judgement]
    why: str
    """Why it holds here, or does not, where decod or this machine is the reason."""


NOT_RUN = Judgement(None, "its points were not run")


def percent(value: float) -> str:
    """Return a share as text."""
    return f"{100 * value:.0f} %"


def change(before: float, after: float) -> float:
    """Return a change as a share of what was before."""
    return after / before - 1 if before else 0.0


def _fewer(name: str, before: PointResult, after: PointResult) -> Judgement:
    """Judge whether a number of seconds falls."""
    old, new = getattr(before, name), getattr(after, name)
    return Judgement(change(old, new) < -TIME_TOLERANCE, f"{old:.2f} s -> {new:.2f} s")


def _accuracies(*results: PointResult) -> str:
    return " -> ".join(percent(result.accuracy) for result in results)


def _two_hosts_are_faster(results: Results) -> Judgement:
    before, after = results.find(Point(peers=0)), results.find(Point())
    return NOT_RUN if before is None or after is None else _fewer("runtime_s", before, after)


def _gain_is_not_linear(results: Results) -> Judgement:
    found = [results.find(Point(peers=peers)) for peers in (0, 2, 4)]
    plain, two, four = found
    if plain is None or two is None or four is None:
        return NOT_RUN
    figures = " -> ".join(f"{each.runtime_s:.1f} s" for each in (plain, two, four))
    first, second = plain.runtime_s / two.runtime_s, two.runtime_s / four.runtime_s
    return Judgement(first > second - TIME_TOLERANCE and second < 2 - TIME_TOLERANCE, figures)


def _accuracy_suffers(results: Results) -> Judgement:
    pairs = [
        (plain, each)
        for each in results
        if each.point.peers and (plain := results.find(each.point.baseline)) is not None
    ]
    if not pairs:
        return NOT_RUN
    worse = [each for plain, each in pairs if each.accuracy < plain.accuracy - ACCURACY_TOLERANCE]
    return Judgement(
        len(worse) >= 0.75 * len(pairs), f"lower in {len(worse)} of {len(pairs)} points"
    )


def _gradients_suffer_from_targets(results: Results) -> Judgement:
    before, after = results.find(Point()), results.find(Point(target=LARGE_TARGET))
    if before is None or after is None:
        return NOT_RUN
    lower = after.accuracy < before.accuracy - ACCURACY_TOLERANCE
    return Judgement(lower, f"target {TARGET} -> {LARGE_TARGET}: {_accuracies(before, after)}")


def _local_is_better(results: Results) -> Judgement:
    pairs = [
        (gradients, local)
        for gradients, local in results.pairs(local=True)
        if gradients.point.peers and gradients.point.target == LARGE_TARGET
    ]
    if not pairs:
        return NOT_RUN
    better = [a for a, b in pairs if b.accuracy > a.accuracy + ACCURACY_TOLERANCE]
    figures = "; ".join(f"{a.point.peers} hosts {_accuracies(a, b)}" for a, b in pairs)
    return Judgement(len(better) == len(pairs), figures)


def _local_costs_no_time(results: Results) -> Judgement:
    before, after = results.find(Point()), results.find(Point(local=True))
    if before is None or after is None:
        return NOT_RUN
    cost = change(before.runtime_s, after.runtime_s)
    return Judgement(cost < 2 * TIME_TOLERANCE, f"runtime {percent(cost)} more")


def _local_suffers_from_hosts(results: Results) -> Judgement:
    before, after = results.find(Point(local=True)), results.find(Point(local=True, peers=4))
    if before is None or after is None:
        return NOT_RUN
    lower = after.accuracy < before.accuracy - ACCURACY_TOLERANCE
    return Judgement(lower, f"2 -> 4 hosts: {_accuracies(before, after)}")


def _accumulation(results: Results, *, local: bool, better: bool) -> Judgement:
    before, after = (
        results.find(Point(local=local)),
        results.find(Point(local=local, accumulation=2)),
    )
    if before is None or after is None:
        return NOT_RUN
    gain = after.accuracy - before.accuracy
    holds = gain > ACCURACY_TOLERANCE if better else gain < -ACCURACY_TOLERANCE
    return Judgement(holds, f"accumulation 1 -> 2: {_accuracies(before, after)}")


def _accumulation_saves_time(results: Results) -> Judgement:
    before, after = results.find(Point(local=True)), results.find(Point(local=True, accumulation=2))
    return NOT_RUN if before is None or after is None else _fewer("optimizer_s", before, after)


def _targets_cost_time(results: Results) -> Judgement:
    before, after = results.find(Point()), results.find(Point(target=LARGE_TARGET))
    if before is None or after is None:
        return NOT_RUN
    more = change(before.optimizer_s, after.optimizer_s) > TIME_TOLERANCE
    figures = f"{before.optimizer_s:.2f} s -> {after.optimizer_s:.2f} s"
    return Judgement(more, f"target {TARGET} -> {LARGE_TARGET}: {figures}")


def _hosts_save_time(results: Results) -> Judgement:
    before, after = results.find(Point()), results.find(Point(peers=4))
    return NOT_RUN if before is None or after is None else _fewer("optimizer_s", before, after)


def _hosts_use_network(results: Results) -> Judgement:
    before, after = results.find(Point()), results.find(Point(peers=4))
    if before is None or after is None:
        return NOT_RUN
    old, new = (each.sent_bytes_per_s / 1e6 for each in (before, after))
    return Judgement(
        change(old, new) > TIME_TOLERANCE, f"{old:.1f} -> {new:.1f} MB/s sent by a host"
    )


def _network_is_wide(results: Results) -> Judgement:
    busiest = max(results, key=lambda each: each.sent_bytes_per_s, default=None)
    if busiest is None or not busiest.sent_bytes:
        return NOT_RUN
    rate = busiest.sent_bytes_per_s / 1e6
    return Judgement(rate < 125, f"at most {rate:.1f} MB/s of a host; 1 Gbit/s is 125 MB/s")


def _rates_hide_accumulation(results: Results) -> Judgement:
    gains = {}
    for before, after in results.pairs(accumulation=2):
        if before.point == Point(rate=before.point.rate):
            gains[before.point.rate] = abs(after.accuracy - before.accuracy)
    if len(gains) < 2:
        return NOT_RUN
    low, high = gains[min(gains)], gains[max(gains)]
    return Judgement(
        low > high, f"difference {percent(low)} at low and {percent(high)} at high rates"
    )


FINDINGS = (
    ThesisFinding(
        "faster",
        "Two hosts with half of the processors each are 20 to 40 % faster than one process.",
        "6.2",
        _two_hosts_are_faster,
        f"Only waiting for data overlaps ({1000 * LOAD_S:g} ms a picture here, slow storage "
        "there). Two hosts run four more processes, which take their time of shared processors. "
        "The thesis' hosts were machines of their own.",
    ),
    ThesisFinding(
        "not-linear",
        "More hosts with the same processors bring less and less.",
        "6.5",
        _gain_is_not_linear,
        "The processors are shared, so only waiting for data can overlap. Four hosts here have two "
        "processors, and two more processes each.",
    ),
    ThesisFinding(
        "accuracy",
        "Nearly all runs are less accurate than one process after as many samples.",
        "6.2",
        _accuracy_suffers,
        "Rounds are fewer and larger steps than those of one process. A small sample budget "
        "rewards many steps. Local updates take them, and two hosts with them keep up.",
    ),
    ThesisFinding(
        "targets",
        "Without local updates, a larger target batch size costs accuracy.",
        "6.4",
        _gradients_suffer_from_targets,
        "The optimizer steps once a round, so four times the target is a quarter of the steps.",
    ),
    ThesisFinding(
        "local",
        "Local updates are more accurate at large target batch sizes.",
        "6.4",
        _local_is_better,
        "Hosts step at each batch, and rounds only bring them together.",
    ),
    ThesisFinding(
        "local-free",
        "Local updates cost no time.",
        "6.4",
        _local_costs_no_time,
        "Each step takes the optimizer's step, and a round compares parameters with the last "
        "average. With a small model these weigh more than a pass of a large one.",
    ),
    ThesisFinding(
        "local-hosts",
        "With local updates, more hosts are less accurate.",
        "6.5",
        _local_suffers_from_hosts,
        "Each host takes fewer steps, and their average moves as far as one host does.",
    ),
    ThesisFinding(
        "accumulation",
        "Without local updates, accumulating over 2 steps is more accurate by 5 to 10 %.",
        "6.3, 6.4",
        lambda results: _accumulation(results, local=False, better=True),
        "decod adds gradients up until the round ends in any case, weighted by samples. "
        "Accumulation changes only when a host tells of its samples.",
    ),
    ThesisFinding(
        "local-accumulation",
        "With local updates, accumulating over 2 steps is less accurate.",
        "6.4",
        lambda results: _accumulation(results, local=True, better=False),
        "Hosts take half as many steps.",
    ),
    ThesisFinding(
        "accumulation-time",
        "With local updates, accumulating over 2 steps halves the optimizer's time.",
        "6.5",
        _accumulation_saves_time,
        "Half of the steps are left out. The rounds, and what they take, stay.",
    ),
    ThesisFinding(
        "target-time",
        "A larger target batch size costs more time in the optimizer.",
        "6.2",
        _targets_cost_time,
        "In decod nobody searches for others, so a round costs the same at any target, and a "
        "larger target has fewer rounds.",
    ),
    ThesisFinding(
        "host-time",
        "More hosts spend less time in the optimizer, for as many samples.",
        "6.5",
        _hosts_save_time,
        "There are as many rounds, since they end by samples. Each host takes fewer steps, but "
        "more hosts share the processors here.",
    ),
    ThesisFinding(
        "host-network",
        "More hosts use more bandwidth each.",
        "6.5",
        _hosts_use_network,
        "A host sends (n - 1) / n of the model twice a round: 1 model with two hosts, 1.5 with "
        "four.",
    ),
    ThesisFinding(
        "network",
        "The network is no bottleneck.",
        "6.2, 8",
        _network_is_wide,
        "The model is small, as ResNet18 is for a local network. Over an uplink of 10 Mbit/s it "
        "would be one: raise the target batch size or compress.",
    ),
    ThesisFinding(
        "rates",
        "Accumulation matters less at high learning rates.",
        "6.3",
        _rates_hide_accumulation,
        "Differences are within the noise of single runs. The rate of the other points is "
        f"{RATE:g}.",
    ),
)
