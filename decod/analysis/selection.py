"""Which of the recorded rounds a report is about, and the model of these."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decod.analysis.iteration_model import RoundModel, mean
from decod.analysis.metrics_reading import Records
from decod.analysis.optimizer_model import optimizer_model
from decod.analysis.pipeline_model import pipeline_model
from decod.analysis.records import HostRow, Mode, RoundRow
from decod.errors import DataError
from decod.obs.text import clean_text

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
