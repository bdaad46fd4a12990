"""Questions that the thesis leaves open, and what other results say."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from decod.lab.study.findings import change, percent
from decod.lab.study.grid import ACCUMULATIONS, PLAIN, Point
from decod.lab.study.results import ACCURACY_TOLERANCE, PointResult, Results


@dataclass(frozen=True, slots=True)
class Question:
    """One open question."""

    name: str
    text: str
    section: str
    answer: Callable[[Results], str]


_NOT_RUN = "its points were not run"


def _larger_accumulation(results: Results) -> str:
    lines = []
    for accumulation in ACCUMULATIONS[1:]:
        some = Point(accumulation=accumulation)
        host, plain = results.find(some), results.find(some.baseline)
        if host is not None and plain is not None:
            lines.append(
                f"accumulation {accumulation}: {percent(host.accuracy)} in {host.rounds} rounds, "
                f"one process {percent(plain.accuracy)}"
            )
    base = results.find(Point())
    if base is None or not lines:
        return _NOT_RUN
    return (
        f"accumulation 1: {percent(base.accuracy)} in {base.rounds} rounds; {'; '.join(lines)}. "
        "Hosts add gradients up until the round ends in any case, so accumulation matters only "
        "once a step has as many samples as the target: then rounds are larger and fewer. One "
        "process takes fewer steps, and loses."
    )


def _larger_targets(results: Results) -> str:
    lines = [
        f"{'local updates' if few.point.local else 'gradients'}, target {few.point.target}: "
        f"{percent(few.accuracy)} with 2 hosts, {percent(many.accuracy)} with 4"
        for few, many in results.pairs(peers=4)
        if few.point.peers == 2
    ]
    if not lines:
        return _NOT_RUN
    times = [
        f"{change(small.optimizer_s, large.optimizer_s):+.0%} in step()"
        for small, large in results.pairs(target=512)
        if small.point == Point(peers=4)
    ]
    return "; ".join(lines) + (f". With 4 hosts, target 512 takes {times[0]}" if times else "")


def _matchmaking(results: Results) -> str:
    hosts = [each for each in results if each.point.peers and each.rounds > 1]
    if not hosts:
        return _NOT_RUN
    whole = min(each.whole_rounds for each in hosts)
    lines = [
        f"{peers} hosts: {_mean(some, 'averaging_s'):.3f} s from a full batch to the average"
        for peers in sorted({each.point.peers for each in hosts})
        if (some := [each for each in hosts if each.point.peers == peers])
    ]
    return (
        "There is no such time to choose: the coordinator closes a round as soon as it has the "
        f"samples, with all hosts that live. {'; '.join(lines)}. All hosts took part in at least "
        f"{percent(whole)} of the rounds of each point. Hosts that end earlier miss the last ones."
    )


def _mean(results: list[PointResult], name: str) -> float:
    return float(sum(getattr(each, name) for each in results) / len(results))


def _faster_storage(results: Results) -> str:
    found = [
        (results.find(plain), results.find(replace(plain, peers=2)))
        for plain in (PLAIN, replace(PLAIN, load_s=0.0))
    ]
    lines = [
        f"{name}: two hosts take {change(plain.runtime_s, two.runtime_s):+.0%} of the time"
        for name, (plain, two) in zip(("slow storage", "no loading"), found, strict=True)
        if plain is not None and two is not None
    ]
    return "; ".join(lines).replace(" of the time", "") or _NOT_RUN


def _large_model_of_hosts(results: Results) -> str:
    gains = [
        local.accuracy - gradients.accuracy
        for gradients, local in results.pairs(local=True)
        if gradients.point.peers >= 4
    ]
    if not gains:
        return _NOT_RUN
    better = sum(gain > ACCURACY_TOLERANCE for gain in gains)
    return f"with 4 hosts or more, local updates are better in {better} of {len(gains)} pairs"


QUESTIONS = (
    Question(
        "accumulation",
        "Does more accumulation than 2 make runs without local updates better than one process?",
        "6.3",
        _larger_accumulation,
    ),
    Question(
        "matchmaking",
        "Should the time for matchmaking adapt to how long steps take?",
        "6.5",
        _matchmaking,
    ),
    Question(
        "targets",
        "Is a larger target batch size good with more hosts?",
        "6.5",
        _larger_targets,
    ),
    Question(
        "storage",
        "How much of the gain is left if data load faster?",
        "6.2, 6.5",
        _faster_storage,
    ),
    Question(
        "local",
        "Do local updates stay better with more hosts?",
        "6.4",
        _large_model_of_hosts,
    ),
)
