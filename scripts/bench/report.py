"""Figures from samples: medians, the best number of threads, ratios, and a report on them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bench.subject import Sample

SCHEMA_VERSION = 1

LOSS_DIFFERENCE_MAX = 1e-4
"""Largest difference of two subjects' losses in an iteration that counts as the same job. Only the
order of summation may differ."""

FOREIGN_CORES_MAX = 0.1
"""If other work keeps more cores than this busy, the figures are doubtful."""

TARGETS = {"torch pipeline": 1.0, "one process": 0.95, "decod, transformers": 1.0}
"""The targets of decod's rate, as multiples of each other subject's."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one subject at its best number of threads."""

    subject: str
    num_threads: int
    tokens_per_s: float
    """Median over the rounds."""
    samples: tuple[Sample, ...]
    """The launches with this setting, in the order of the rounds."""

    @property
    def median_sample(self) -> Sample:
        """The launch with the median rate, or the next higher one."""
        return sorted(self.samples, key=lambda each: each.tokens_per_s)[len(self.samples) // 2]


def best_results(samples: Sequence[Sample]) -> dict[str, Result]:
    """Return each subject's result at the number of threads with the highest median."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.subject, sample.num_threads), []).append(sample)
    best: dict[str, Result] = {}
    for (subject, num_threads), members in groups.items():
        rate = median(sample.tokens_per_s for sample in members)
        if subject not in best or rate > best[subject].tokens_per_s:
            best[subject] = Result(subject, num_threads, rate, tuple(members))
    return best


def loss_difference(samples: Sequence[Sample]) -> tuple[float, int]:
    """Return the largest difference of losses in an iteration, and the number of iterations."""
    shared = set.intersection(*(set(sample.losses) for sample in samples)) if samples else set()
    differences = [
        max(sample.losses[iteration] for sample in samples)
        - min(sample.losses[iteration] for sample in samples)
        for iteration in shared
    ]
    return max(differences, default=0.0), len(differences)


def ratios(results: Mapping[str, Result]) -> dict[str, float]:
    """Return decod's rate divided by each other subject's; empty without decod.

    A ratio is the median over rounds of the ratio within a round: between launches that are minutes
    apart, the speed of the machine may have changed.
    """
    if "decod" not in results:
        return {}
    ours = {sample.round_index: sample.tokens_per_s for sample in results["decod"].samples}
    found = {}
    for name, result in results.items():
        pairs = [
            ours[sample.round_index] / sample.tokens_per_s
            for sample in result.samples
            if sample.round_index in ours
        ]
        if name != "decod" and pairs:
            found[name] = median(pairs)
    return found


def tokens_per_cpu_s(sample: Sample) -> float:
    """Return the tokens that are trained in a second of processor time.

    Other work on the machine disturbs this figure less than the rate. Waiting does not count, but
    spinning does.
    """
    return sample.tokens_per_s * sample.iteration_s / max(1e-9, sum(sample.cpu_s.values()))


def account(sample: Sample, num_cores: int) -> dict[str, float]:
    """Return how the time of all cores in an iteration was spent, in seconds.

    Args:
        sample: A sample of decod, whose nodes have measured their own time.
        num_cores: Number of cores of the machine, which decod must have had to itself.

    Returns:
        `compute`: the compute processes without copies. `copy`: tensors between device, arena and
        frames. `serialization`: messages, job requests and checksums. `sockets`: the rest of the
        node processes: gRPC, event loop, the core. `wait`: idle cores. The sum is the whole time.
    """

    def told(purpose: str) -> float:
        return sum(timing.get(purpose, 0.0) for timing in sample.timing.values())

    total_s = sum(sample.cpu_s.values())
    computing_s = sum(cpu_s for name, cpu_s in sample.cpu_s.items() if name.endswith(" compute"))
    copy_s, serialization_s = told("copy_s") + told("node_copy_s"), told("node_serialize_s")
    return {
        "compute": computing_s - told("copy_s"),
        "copy": copy_s,
        "serialization": serialization_s,
        "sockets": total_s - computing_s - told("node_copy_s") - serialization_s,
        "wait": num_cores * sample.iteration_s - total_s,
    }


def as_json(samples: Sequence[Sample], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything as one object.

    Args:
        samples: All launches, in order.
        facts: The machine and the settings of the measurement.
    """
    results = best_results(samples)
    difference, num_compared = loss_difference(samples)
    accounts = {
        name: account(result.median_sample, os.cpu_count() or 1)
        for name, result in results.items()
        if result.median_sample.timing
    }
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "results": {
            name: {"tokens_per_s": result.tokens_per_s, "num_threads": result.num_threads}
            for name, result in results.items()
        },
        "ratios": {f"decod / {name}": value for name, value in ratios(results).items()},
        "accounts": accounts,
        "loss_difference": difference,
        "num_losses_compared": num_compared,
        "samples": [asdict(sample) for sample in samples],
    }


def as_text(samples: Sequence[Sample]) -> str:
    """Return the report for people."""
    results = best_results(samples)
    lines = [*_rates(samples, results), *_ratio_lines(results), *_losses(samples)]
    foreign = max((sample.foreign_cores for sample in samples), default=0.0)
    if foreign > FOREIGN_CORES_MAX:
        lines.append(f"DOUBTFUL: other work kept up to {foreign:.1f} cores busy meanwhile")
    for result in results.values():
        lines += _where_time_goes(result)
    return "\n".join(lines)


def _rates(samples: Sequence[Sample], results: Mapping[str, Result]) -> list[str]:
    lines = ["subject          threads  tokens/s  per cpu second  of rounds"]
    settings = dict.fromkeys((sample.subject, sample.num_threads) for sample in samples)
    for subject, num_threads in settings:
        members = [
            sample
            for sample in samples
            if (sample.subject, sample.num_threads) == (subject, num_threads)
        ]
        rates = [sample.tokens_per_s for sample in members]
        thrift = median(tokens_per_cpu_s(sample) for sample in members)
        mark = "  best" if results[subject].num_threads == num_threads else ""
        every = " ".join(f"{rate:.0f}" for rate in rates)
        lines.append(
            f"{subject:16} {num_threads:7}  {median(rates):8.0f}{thrift:16.0f}  {every}{mark}"
        )
    return lines


def _ratio_lines(results: Mapping[str, Result]) -> list[str]:
    lines = []
    for name, ratio in ratios(results).items():
        target = TARGETS[name]
        verdict = "met" if ratio >= target else "MISSED"
        lines.append(f"decod / {name:16} {ratio:6.3f}  target {target:.2f} {verdict}")
    return ["", *lines] if lines else []


def _losses(samples: Sequence[Sample]) -> list[str]:
    difference, num_compared = loss_difference(samples)
    verdict = "the same job" if difference <= LOSS_DIFFERENCE_MAX else "NOT THE SAME JOB"
    return [
        "",
        f"losses differ by at most {difference:.1e} in {num_compared} iterations: {verdict}",
    ]


def _where_time_goes(result: Result) -> list[str]:
    """Return the processor time of the median launch and, for decod, the nodes' own figures."""
    sample = result.median_sample
    total_s = sum(sample.cpu_s.values())
    lines = ["", f"{result.subject}: an iteration takes {sample.iteration_s:.2f} s;"]
    lines[-1] += f" processor time {total_s:.2f} s, of which"
    lines += [f"  {name:18} {cpu_s:6.2f} s" for name, cpu_s in sample.cpu_s.items()]
    if sample.timing:
        num_cores = os.cpu_count() or 1
        lines.append(f"  where the time of {num_cores} cores goes:")
        for purpose, seconds in account(sample, num_cores).items():
            share = seconds / (num_cores * sample.iteration_s)
            lines.append(f"    {purpose:16} {seconds:6.2f} s {share:7.1%}")
        lines += _timing_table(sample.timing)
    return lines


def _timing_table(timings: Mapping[str, Mapping[str, float]]) -> list[str]:
    columns = list(dict.fromkeys(key for timing in timings.values() for key in timing))
    heads = "".join(f"{column.removesuffix('_s').replace('_', ' '):>16}" for column in columns)
    lines = ["  seconds per iteration, as the nodes measure them:", f"{'':20}{heads}"]
    for name, timing in timings.items():
        cells = "".join(f"{timing.get(column, 0.0):16.3f}" for column in columns)
        lines.append(f"  {name:18}{cells}")
    return lines
