"""Checks the logs of a run's nodes: was anything lost, or done twice?

    python -m tests.support.history STATE_DIR...

It knows nothing of how the protocol works. It knows only the meaning of the events in each node's
`node.log`, and the promises of a run. A *life* of a node lasts from one `node.started` to the next.
The rules:

- **gaps**: the committed iterations of the run, and of each life, have no gap;
- **same** (I3): all nodes that commit an iteration commit the same iteration with the same loss,
  and all of one stage the same parameters. A node that has opened a later attempt does not continue
  from the committed one;
- **once** (I2): the microbatches that the members of a stage have folded into its gradient add up
  to the batch, in number and digest, at every stage. A batch holds each microbatch once;
- **one leader** (I4): all nodes that open an iteration of a term name the same leader, and no life
  goes back to an earlier term or iteration.

A run that has lost a stage may go back and begin a new *era*. Commits of an earlier era from that
point on no longer count, but must have been right at their time.

A node may be lost together with a commit that no other node has. This may only be its last commit,
which the others repeat. It is counted, but is no violation. If a member is killed before it writes
its commit down, its part is unknown: its stage's sum is then checked only from above. Servers of a
stage with clients also write down what each member has contributed. Their sums are then checked in
any case, and contributions are compared with what members say that they had folded.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from typing_extensions import override

_MASK = (1 << 63) - 1
_RECORD = '{"time": '

Iteration = tuple[int, int, int]
"""Era, iteration, attempt."""

Folded = tuple[int, int]
"""Number and digest of microbatches."""

Place = tuple[int, Iteration]
"""Term and iteration."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One iteration, as one life of a node has committed it."""

    node: str
    life: int
    at: Iteration
    loss: float
    num_tokens: int
    account: Mapping[str, Any]
    """The basis of its vote; empty for a node that joined with this commit."""
    num_passes: int = 0
    """Number of passes of microbatches that this life has computed so far."""
    node_id: str = ""
    """As other nodes name it."""
    averaged: Mapping[int, Mapping[str, Folded]] = field(default_factory=dict)
    """Of each part of the average that it has made: what each member had put in, by its id."""

    @property
    def who(self) -> str:
        return f"{self.node} (life {self.life})"

    @property
    def era(self) -> int:
        return self.at[0]

    @property
    def iteration(self) -> int:
        return self.at[1]

    @property
    def attempt(self) -> int:
        return self.at[2]


@dataclass(slots=True)
class Life:
    """A node from one start to the next."""

    node: str
    number: int
    node_id: str = ""
    commits: list[Commit] = field(default_factory=list)
    opened: list[tuple[Place, str]] = field(default_factory=list)
    """Iterations that it has opened, each with its leader."""
    averaged: dict[str, dict[int, dict[str, Folded]]] = field(default_factory=dict)
    """By iteration, as for a commit."""

    @property
    def who(self) -> str:
        return f"{self.node} (life {self.number})"

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one event."""
        match record.get("event"):
            case "node.started":
                self.node_id = record.get("node_id", "")
            case "step.committed":
                self.commits.append(
                    Commit(
                        self.node,
                        self.number,
                        _iteration(record["iteration"]),
                        record["loss"],
                        record["num_tokens"],
                        {key: record[key] for key in _ACCOUNT if key in record},
                        record.get("num_passes", 0),
                        self.node_id,
                        self.averaged.pop(record["iteration"], {}),
                    )
                )
            case "contribution.averaged":
                part = self.averaged.setdefault(record["iteration"], {}).setdefault(
                    record["part"], {}
                )
                part[record["peer"]] = record["num_folded"], record["digest_folded"]
            case "iteration.opened" if "term" in record:
                place = (record["term"], _iteration(record["iteration"]))
                self.opened.append((place, record["leader"]))


_ACCOUNT = (
    "term",
    "view_version",
    "stage",
    "num_members",
    "num_folded",
    "digest_folded",
    "num_batch",
    "digest_batch",
    "parameter_hash",
)


@dataclass(slots=True)
class Findings:
    """The result of a check."""

    violations: list[str] = field(default_factory=list)
    num_iterations: int = 0
    num_commits: int = 0
    """Number of commits of all nodes."""
    num_sums: int = 0
    """Sums of a stage that were compared with the batch in full."""
    num_partial: int = 0
    """Sums that lack a member which was killed before it wrote its commit down."""
    orphans: list[str] = field(default_factory=list)
    """Last commits of lives, which the others have repeated."""
    leaders: dict[int, str] = field(default_factory=dict)
    """Leader of each term."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """One commit of each iteration."""

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: commit.loss for iteration, commit in self.commits.items()}

    @override
    def __str__(self) -> str:
        lines = [
            f"{self.num_iterations} iterations, {self.num_commits} commits of nodes, "
            f"{len(self.leaders)} terms, {len(self.orphans)} commits repeated by others; "
            f"{self.num_sums} sums of stages equal the batch, {self.num_partial} lack a dead member"
        ]
        lines += [f"repeated: {text}" for text in self.orphans]
        lines += [f"VIOLATION {text}" for text in self.violations]
        return "\n".join(lines)


def read_lives(node: str, state_dir: Path) -> list[Life]:
    """Return the lives of a node from its log and the older ones beside it."""
    return lives_of(node, read_records(state_dir))


def read_records(state_dir: Path) -> Iterator[dict[str, Any]]:
    """Return the records of a node's log and the older ones beside it, oldest first."""
    logs = [state_dir / f"node.log.{number}" for number in range(9, 0, -1)]
    lines: list[str] = []
    for path in [*logs, state_dir / "node.log"]:
        if path.exists():
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
    return records_of(lines)


def records_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the records. A record that a kill cut off is skipped, but not the next one."""
    for line in lines:
        begin = line.rfind(_RECORD)
        try:
            record = json.loads(line[begin:]) if begin >= 0 else None
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def lives_of(node: str, records: Iterable[Mapping[str, Any]]) -> list[Life]:
    """Return the lives of a node from its records."""
    lives: list[Life] = []
    for record in records:
        if record.get("event") == "node.started" or not lives:
            lives.append(Life(node, len(lives) + 1))
        lives[-1].take(record)
    return lives


def check(lives: Sequence[Life]) -> Findings:
    """Compare all lives of all nodes of one run."""
    found = Findings()
    found.num_commits = sum(len(life.commits) for life in lives)
    iterations: dict[tuple[int, int], list[Commit]] = defaultdict(list)
    for life in lives:
        _check_life(life, found)
        for commit in life.commits:
            iterations[commit.era, commit.iteration].append(commit)
    _check_leaders(lives, found)
    # The last commit of each life in each era.
    last = {id(commit) for life in lives for commit in _by_era(life).values()}
    for (_, iteration), commits in sorted(iterations.items()):
        kept = _without_orphans(commits, last, found)
        # A node that joins with a commit has not voted for it. A later era replaces an earlier one.
        found.commits[iteration] = next((c for c in kept if c.account), kept[0])
        _check_same(kept, found)
        _check_once(kept, found)
        _check_attempts(lives, kept[0], found)
    numbers = sorted(found.commits)
    found.num_iterations = len(numbers)
    if numbers and numbers != list(range(numbers[0], numbers[-1] + 1)):
        gaps = [(a, b) for a, b in pairwise(numbers) if b != a + 1]
        found.violations.append(f"gaps: nobody has committed what lies between {gaps}")
    return found


def _by_era(life: Life) -> dict[int, Commit]:
    """Return the last commit of a life in each era."""
    return {commit.era: commit for commit in life.commits}


def _check_life(life: Life, found: Findings) -> None:
    for before, after in pairwise(life.commits):
        again = after.era > before.era and after.iteration <= before.iteration
        if after.iteration != before.iteration + 1 and not again:
            text = f"{life.who} commits {after.iteration} after {before.iteration}"
            found.violations.append(f"gaps: {text}")
    for (earlier, _), (later, _) in pairwise(life.opened):
        if later <= earlier:
            found.violations.append(f"one leader: {life.who} goes back from {earlier} to {later}")


def _check_leaders(lives: Sequence[Life], found: Findings) -> None:
    for life in lives:
        for (term, _), leader in life.opened:
            if found.leaders.setdefault(term, leader) != leader:
                text = f"{life.who} follows {leader} in term {term}, others {found.leaders[term]}"
                found.violations.append(f"one leader: {text}")
                return


def _without_orphans(commits: list[Commit], last: set[int], found: Findings) -> list[Commit]:
    """Return the valid commits of an iteration: those of the latest attempt."""
    attempt = max(commit.attempt for commit in commits)
    kept = []
    for commit in commits:
        if commit.attempt == attempt:
            kept.append(commit)
        elif id(commit) in last:
            found.orphans.append(f"{commit.who} has {commit.iteration}.{commit.attempt} alone")
        else:
            text = f"{commit.who} goes on from {commit.iteration}.{commit.attempt}"
            found.violations.append(f"same: {text}, others from attempt {attempt}")
    return kept


def _check_attempts(lives: Sequence[Life], commit: Commit, found: Findings) -> None:
    """Check that no node continues from an attempt that it has given up."""
    for life in lives:
        last = _by_era(life).get(commit.era)
        if last is None or last.iteration < commit.iteration:
            continue
        for (_, (era, iteration, attempt)), _ in life.opened:
            if (era, iteration) == (commit.era, commit.iteration) and attempt > commit.attempt:
                text = f"{life.who} has opened {iteration}.{attempt}, and goes on from"
                found.violations.append(f"same: {text} {iteration}.{commit.attempt}")


def _check_same(commits: list[Commit], found: Findings) -> None:
    first = commits[0]
    hashes: dict[int, Commit] = {}
    for commit in commits:
        if (commit.loss, commit.num_tokens) != (first.loss, first.num_tokens):
            text = f"{commit.who} has loss {commit.loss} over {commit.num_tokens} tokens"
            text += f" in {commit.iteration}, {first.who} {first.loss} over {first.num_tokens}"
            found.violations.append(f"same: {text}")
        if "parameter_hash" not in commit.account:
            continue  # It has not voted: it joined with this commit, or is a client.
        stage = commit.account["stage"]
        other = hashes.setdefault(stage, commit)
        if other.account["parameter_hash"] != commit.account["parameter_hash"]:
            text = f"{commit.who} and {other.who} differ at stage {stage} after {commit.iteration}"
            found.violations.append(f"same: {text}")


def _check_once(commits: list[Commit], found: Findings) -> None:
    voters = [commit for commit in commits if commit.account]
    batches = {
        tuple(c.account[key] for key in ("term", "view_version", "num_batch", "digest_batch"))
        for c in voters
    }
    iteration = commits[0].iteration
    if len(batches) > 1:
        found.violations.append(f"once: the batch of {iteration} is told in {len(batches)} ways")
        return
    stages: dict[int, dict[str, Commit]] = defaultdict(dict)
    for commit in voters:
        if stages[commit.account["stage"]].setdefault(commit.node, commit) is not commit:
            found.violations.append(f"once: {commit.node} has committed {iteration} twice")
    for stage, members in sorted(stages.items()):
        if _check_parts(stage, list(members.values()), found):
            found.num_sums += 1
        else:
            _check_sum(iteration, stage, [c.account for c in members.values()], found)


def _check_sum(
    iteration: int, stage: int, accounts: Sequence[Mapping[str, Any]], found: Findings
) -> None:
    first = accounts[0]
    num = sum(account["num_folded"] for account in accounts)
    digest = sum(account["digest_folded"] for account in accounts) & _MASK
    missing = first["num_members"] - len(accounts)
    if missing > 0 and num <= first["num_batch"]:
        found.num_partial += 1
    elif missing == 0 and (num, digest) == (first["num_batch"], first["digest_batch"]):
        found.num_sums += 1
    else:
        text = f"stage {stage} has folded {num} microbatches into {iteration}, digest {digest:x};"
        text += f" the batch has {first['num_batch']}, digest {first['digest_batch']:x}"
        found.violations.append(f"once: {text}")


def _check_parts(stage: int, members: Sequence[Commit], found: Findings) -> bool:
    """Check parts of an average, if servers have told what is in them. Return whether any has.

    Each must hold the batch, and of each member what that has folded by its own account.
    """
    folded = {c.node_id: (c.account["num_folded"], c.account["digest_folded"]) for c in members}
    for commit in members:
        batch = commit.account["num_batch"], commit.account["digest_batch"]
        for part, told in commit.averaged.items():
            text = f"once: {commit.who} has averaged part {part} of stage {stage} in"
            text += f" {commit.iteration}"
            sums = sum(n for n, _ in told.values()), sum(d for _, d in told.values()) & _MASK
            if sums != batch:
                found.violations.append(f"{text}, which holds {sums} and not the batch, {batch}")
            found.violations += [
                f"{text}, with {told[node]} of {node}, which has folded {own}"
                for node, own in folded.items()
                if node in told and told[node] != own
            ]
    return any(commit.averaged for commit in members)


# --- which microbatches ---------------------------------------------------------------------------


def digest_of(ids: Iterable[tuple[int, int, int]]) -> int:
    """Return the digest of microbatches, each (iteration, data node, index).

    This is an independent implementation: each field in turn goes through splitmix64.
    """
    total = 0
    for fields in ids:
        value = 0
        for number in fields:
            value = (value + number + 0x9E3779B97F4A7C15) % 2**64
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
            value ^= value >> 31
        total += value
    return total & _MASK


def shares_of(
    found: Findings, *, num_data_nodes: int, num_microbatches: int
) -> dict[int, tuple[int, ...]]:
    """Return the data nodes whose whole shares make up the batch of each iteration, by its digest.

    Adds a violation for a batch of anything else. A microbatch that was put off is something else,
    too.
    """
    shares = {}
    for iteration, commit in found.commits.items():
        if not commit.account:
            continue
        told = (commit.account["num_batch"], commit.account["digest_batch"])
        for nodes in _subsets(num_data_nodes):
            ids = [(iteration, node, i) for node in nodes for i in range(num_microbatches)]
            if told == (len(ids), digest_of(ids)):
                shares[iteration] = nodes
                break
        else:
            text = f"the {told[0]} microbatches of {iteration} are not whole shares of data nodes"
            found.violations.append(f"once: {text}")
    return shares


def _subsets(num: int) -> Iterator[tuple[int, ...]]:
    for size in range(num, 0, -1):
        yield from combinations(range(num), size)


def _iteration(text: str) -> Iteration:
    """Read `41.2`, or `e1:41.2` for era 1, the first after a run's initial era."""
    head, _, rest = text.rpartition(":")
    iteration, _, attempt = rest.partition(".")
    return int(head.removeprefix("e") or 0), int(iteration), int(attempt or 0)


def main(arguments: Sequence[str]) -> int:
    """Check the state folders of one run. Return the exit code."""
    lives = [life for name in arguments for life in read_lives(Path(name).parent.name, Path(name))]
    found = check(lives)
    print(found)
    return int(bool(found.violations) or not found.num_iterations)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
