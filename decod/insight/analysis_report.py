"""Says in words what holds a run back, by how much, what to change, and what that gains.

A report is about the newest recorded rounds of one run (`Selection`) and a model of these.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from decod.errors import DataError
from decod.insight.iteration_model import Cause, Remedy, RoundModel, mean
from decod.insight.optimizer_model import optimizer_model
from decod.insight.pipeline_model import pipeline_model
from decod.insight.round_files import Records
from decod.journal.records import HostRow, Mode, RoundRow
from decod.texts import clean_text

ROUNDS_DEFAULT = 100


@dataclass(frozen=True, slots=True)
class Selection:
    """The newest rounds of one run, and what its hosts did meanwhile."""

    run: str
    mode: Mode
    rounds: list[list[RoundRow]]
    """By round, a row of each peer that has recorded it. No two peers have the same name."""
    hosts: list[HostRow]
    other_runs: list[str]
    """Also in the files, but not in this selection."""

    @property
    def model(self) -> RoundModel:
        """The model of these rounds."""
        match self.mode:
            case Mode.PIPELINE:
                return pipeline_model(self.rounds)
            case Mode.OPTIMIZER:
                return optimizer_model(self.rounds)

    @property
    def rows(self) -> list[RoundRow]:
        return [row for each in self.rounds for row in each]

    @property
    def names(self) -> list[str]:
        """The peers, in the order of their stages and names."""
        return list(dict.fromkeys(row.name for row in sorted(self.rows, key=_place)))

    @property
    def round_s(self) -> float:
        """Mean length of a round."""
        return mean([row.round_s for row in self.rows])


def _place(row: RoundRow) -> tuple[int, str]:
    return row.stage or 0, row.name


def select(
    records: Records, *, run: str | None = None, rounds_max: int = ROUNDS_DEFAULT
) -> Selection:
    """Return the newest rounds.

    Args:
        records: What has been read.
        run: The run's id, or its beginning. None: the run with the newest row.
        rounds_max: Most rounds.

    Raises:
        DataError: There is no such run, or the beginning is that of several (E-DAT-042).
    """
    runs = list(dict.fromkeys(row.run for row in records.rounds))
    newest_run = records.rounds[-1].run
    wanted = [newest_run] if run is None else [each for each in runs if each.startswith(run)]
    if len(wanted) != 1:
        raise DataError(
            f"the run {clean_text(run, limit=80)!r} is not one of those that are recorded",
            why=f"there are {len(runs)}: {', '.join(clean_text(each, limit=20) for each in runs)}",
            fix="name one of them with --run",
            code="E-DAT-042",
        )
    mine = [row for row in records.rounds if row.run == wanted[0]]
    mode = mine[-1].mode
    by_round = defaultdict[int, dict[str, RoundRow]](dict)
    for row in mine:
        if row.mode is mode:
            # The rows are in order, so a round that was repeated counts as it was done last.
            by_round[row.round][row.peer] = row
    newest = sorted(by_round)[-rounds_max:]
    labels = _labels(mine)
    rounds = [
        [replace(row, name=labels[row.peer]) for row in by_round[number].values()]
        for number in newest
    ]
    begin_s = min(row.time_s - row.round_s for each in rounds for row in each)
    hosts = [
        replace(row, name=labels.get(row.peer, row.name))
        for row in records.hosts
        if row.run == wanted[0] and row.time_s >= begin_s
    ]
    others = [each for each in runs if each != wanted[0]]
    return Selection(wanted[0], mode, rounds, hosts, others)


def _labels(rows: Sequence[RoundRow]) -> dict[str, str]:
    """Return a name for each peer that no other has, fit for a terminal."""
    names = {row.peer: clean_text(row.name, limit=40) for row in rows}
    counts = Counter(names.values())
    return {
        peer: name if counts[name] == 1 else f"{name} ({clean_text(peer, limit=12)})"
        for peer, name in names.items()
    }


SCHEMA_VERSION = 1
"""Of the JSON report. Fields are only ever added."""

CHANGES_MAX = 5
_GAIN_MIN = 0.02
"""A change that gains less is not worth a line."""
_COMPUTE_BOUND = 0.7
"""From this share on, a run computes most of the time, as it should."""
_FOREIGN_SHARE = 0.25
"""Other programs that use so much of a host's processors are named."""

_WORDS: dict[Cause, str] = {
    Cause.DATA: "loading data",
    Cause.COMPUTE: "computing",
    Cause.LINKS: "sending activations",
    Cause.LATENCY: "waiting between stages",
    Cause.AVERAGING: "averaging",
    Cause.MATCHMAKING: "matchmaking",
    Cause.PEER: "waiting for one peer",
    Cause.OTHER: "everything else",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSummary:
    """Means of one peer: times in seconds a round, rates in bytes per second."""

    name: str
    stage: int | None
    samples: float
    data_s: float
    compute_s: float
    wait_s: float
    """Pipeline: time in which its device did nothing."""
    cpu_percent: float | None = None
    foreign_cpu_percent: float | None = None
    """Used by other programs, of all processors of the host."""
    memory_used_percent: float | None = None
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    disk_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What `decod analyse` says of a run."""

    run: str
    mode: Mode
    first_round: int
    last_round: int
    num_rounds: int
    num_peers: int
    """With records."""
    round_s: float
    """Mean length of a round, as it was measured."""
    modelled_round_s: float
    """The same as the model has it. Predictions compare with this."""
    samples_per_s: float
    causes: dict[Cause, float]
    """Seconds of a modelled round, the most first."""
    main_cause: Cause
    slow_peer: str
    verdict: str
    changes: list[Remedy]
    """The greatest gain comes first."""
    peers: list[PeerSummary]
    unknown: list[str]
    """What these files can't tell."""
    warnings: list[str] = field(default_factory=list)
    """About hosts and files."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def report_of(selection: Selection, problems: Sequence[str] = ()) -> RunReport:
    """Return the report on some rounds.

    Args:
        selection: The rounds.
        problems: Lines that could not be read.
    """
    model, numbers = selection.model, [row.round for row in selection.rows]
    causes = dict(sorted(model.causes().items(), key=lambda item: -item[1]))
    main = next(iter(causes))
    changes = sorted(model.changes(), key=lambda each: -each.gain)
    peers = [_summary(selection, name) for name in selection.names]
    return RunReport(
        run=selection.run,
        mode=selection.mode,
        first_round=min(numbers),
        last_round=max(numbers),
        num_rounds=len(selection.rounds),
        num_peers=len(peers),
        round_s=selection.round_s,
        modelled_round_s=model.round_s,
        samples_per_s=model.samples / max(selection.round_s, 1e-9),
        causes=causes,
        main_cause=main,
        slow_peer=model.slow_peer,
        verdict=_verdict(model, main, causes[main]),
        changes=[each for each in changes if each.gain >= _GAIN_MIN][:CHANGES_MAX],
        peers=peers,
        unknown=model.unknown(),
        warnings=[*_warnings(peers), *_about_files(selection, problems)],
    )


def _verdict(model: RoundModel, cause: Cause, seconds: float) -> str:
    """Return in words what holds the run back most."""
    part = seconds / max(model.round_s, 1e-9)
    takes = f"{_of_time(part, seconds)} of a round"
    match cause:
        case Cause.COMPUTE if part >= _COMPUTE_BOUND:
            return f"Computing takes {takes}: nothing holds the run back but its devices."
        case Cause.COMPUTE:
            return f"Computing takes {takes}, more than anything else."
        case Cause.DATA:
            return f"Data hold the run back: peers wait {takes} for them."
        case Cause.LINKS:
            return f"The links between stages hold the run back: they add {takes}."
        case Cause.LATENCY:
            return f"Stages wait for each other {takes}: no device or link is busy all the time."
        case Cause.AVERAGING:
            return f"Averaging holds the run back: it takes {takes}."
        case Cause.MATCHMAKING:
            return f"Matchmaking holds the run back: rounds wait {takes} until they can begin."
        case Cause.PEER:
            return f"One peer holds the run back: all wait {takes} for {model.slow_peer}."
        case Cause.OTHER:
            return (
                f"Most of a round, {_of_time(part, seconds)}, is beyond what is recorded: look at"
                " what the training script does beside its steps."
            )


def _of_time(part: float, seconds: float) -> str:
    return f"{100 * part:.0f} % ({_span(seconds)})"


def _span(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


# --- peers --------------------------------------------------------------------------------------


def _summary(selection: Selection, name: str) -> PeerSummary:
    rows = [row for row in selection.rows if row.name == name]
    hosts = [row for row in selection.hosts if row.name == name]
    compute = [_work_s(row) for row in rows]
    waits = [
        max(0.0, row.round_s - work_s - (row.data_s or 0.0) - (row.averaging_compute_s or 0.0))
        if row.wait_s is None
        else row.wait_s
        for row, work_s in zip(rows, compute, strict=True)
    ]
    return PeerSummary(
        name=name,
        stage=rows[-1].stage,
        samples=mean([row.samples for row in rows]),
        data_s=mean([row.data_s or 0.0 for row in rows]),
        compute_s=mean(compute),
        wait_s=mean(waits),
        **_host_summary(hosts),
    )


def _work_s(row: RoundRow) -> float:
    passes = row.forward_s, row.backward_s, row.unsplit_s
    times = *passes, row.accumulate_s, row.optimizer_s, row.other_s
    return sum(each or 0.0 for each in times)


def _host_summary(hosts: Sequence[HostRow]) -> dict[str, Any]:
    total_s = sum(row.interval_s for row in hosts)
    if not total_s:
        return {}

    def rate(*columns: str) -> float | None:
        values = [getattr(row, column) for row in hosts for column in columns]
        known = [value for value in values if value is not None]
        return sum(known) / total_s if known else None

    cpu = [row.cpu_percent for row in hosts if row.cpu_percent is not None]
    memory = [row.memory_used_percent for row in hosts if row.memory_used_percent is not None]
    cores = max(row.cpu_logical_cores or 0 for row in hosts)
    own = rate("process_cpu_s")
    foreign = None
    if cpu and own is not None and cores:
        foreign = max(0.0, mean(cpu) - 100 * own / cores)
    return {
        "cpu_percent": mean(cpu) if cpu else None,
        "foreign_cpu_percent": foreign,
        "memory_used_percent": max(memory) if memory else None,
        "sent_bytes_per_s": rate("network_sent_bytes"),
        "received_bytes_per_s": rate("network_received_bytes"),
        "disk_bytes_per_s": rate("disk_read_bytes", "disk_write_bytes"),
    }


def _warnings(peers: Sequence[PeerSummary]) -> list[str]:
    found = []
    for peer in peers:
        if (peer.foreign_cpu_percent or 0.0) >= 100 * _FOREIGN_SHARE:
            found.append(
                f"other programs use {peer.foreign_cpu_percent:.0f} % of the processors of"
                f" {peer.name}'s host"
            )
        if (peer.memory_used_percent or 0.0) >= 95:
            found.append(f"the memory of {peer.name}'s host is full ({peer.memory_used_percent} %)")
    return found


def _about_files(selection: Selection, problems: Sequence[str]) -> list[str]:
    found = []
    if selection.other_runs:
        found.append(f"the files also hold {len(selection.other_runs)} other runs: see --run")
    if problems:
        found.append(f"{len(problems)} lines could not be read; the first: {problems[0]}")
    return found


# --- text ---------------------------------------------------------------------------------------


def text_of(report: RunReport) -> str:
    """Return the report for people."""
    unit = "iteration" if report.mode is Mode.PIPELINE else "round"
    peers = f"{report.num_peers} peer{'s' if report.num_peers != 1 else ''}"
    lines = [
        f"{report.mode.value} run {report.run[:12]}, {unit}s {report.first_round} to"
        f" {report.last_round}, recorded by {peers}",
        f"{_span(report.round_s)} {'an' if unit == 'iteration' else 'a'} {unit},"
        f" {report.samples_per_s:.3g} samples/s",
        "",
        report.verdict,
        "",
        f"Where the time of {'an' if unit == 'iteration' else 'a'} {unit} goes:",
    ]
    for cause, seconds in report.causes.items():
        if seconds > 0:
            part = 100 * seconds / max(report.modelled_round_s, 1e-9)
            who = f" ({report.slow_peer})" if cause is Cause.PEER else ""
            lines.append(f"  {part:3.0f} %  {_span(seconds):>8}  {_WORDS[cause]}{who}")
    lines += ["", *_change_lines(report.changes), "", *_peer_lines(report.peers)]
    for title, texts in (
        ("What these files can't tell:", report.unknown),
        ("Beware:", report.warnings),
    ):
        if texts:
            lines += ["", title, *(f"  {text}" for text in texts)]
    return "\n".join(lines)


def _change_lines(changes: Sequence[Remedy]) -> list[str]:
    if not changes:
        return ["No change that the model knows would gain more than 2 %."]
    lines = ["What to change, one at a time, and the predicted speed:"]
    for each in changes:
        lines.append(
            f"  {100 * each.gain:+4.0f} %  {each.samples_per_s:7.3g} samples/s  {each.what}"
        )
        if each.caution:
            lines.append(f"{'':30}{each.caution}")
    return lines


def _peer_lines(peers: Sequence[PeerSummary]) -> list[str]:
    lines = [
        f"{'peer':<20} {'stage':>5} {'samples':>8} {'data':>8} {'compute':>8} {'waits':>8}"
        f" {'CPU':>6} {'memory':>7} {'up':>9} {'down':>9}"
    ]
    for peer in peers:
        stage = "" if peer.stage is None else str(peer.stage)
        lines.append(
            f"{peer.name:<20} {stage:>5} {peer.samples:8.4g} {_span(peer.data_s):>8}"
            f" {_span(peer.compute_s):>8} {_span(peer.wait_s):>8} {_percent(peer.cpu_percent):>6}"
            f" {_percent(peer.memory_used_percent):>7} {_rate(peer.sent_bytes_per_s):>9}"
            f" {_rate(peer.received_bytes_per_s):>9}"
        )
    return lines


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f} %"


def _rate(value: float | None) -> str:
    return "?" if value is None else f"{value / 1e6:.3g} MB/s"
