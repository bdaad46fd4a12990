"""Trains with real daemons through a storm of faults, and says what was lost: time, nothing else.

    sudo python scripts/soak.py --minutes 5 --twin
    python scripts/soak.py --minutes 1 --no-networks
    python scripts/soak.py --minutes 2 --no-networks --local

Two data nodes and ten relays in three stages, each two processes; a fault strikes every ten
seconds: hosts are killed, frozen, restarted and asked to leave, or sleep for up to two minutes; the
leader is killed, or asked to leave; the tensors of a relay trickle; links are cut in one direction
(in network namespaces, which need root). With `--twin` the same run goes on beside it without
faults. What all nodes have logged is audited afterwards, and the losses are compared with those of
one process. With `--local`, members step by themselves (DiLoCoX), and the loss at the end is
compared with the twin's. Exits with 1 if anything was lost, or if the storm has cost more time,
memory or open files than it may: see `tests/support/soak.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.network import missing  # noqa: E402
from tests.support.soak import Outcome, Plan, soak, soak_folder  # noqa: E402

THROUGHPUT_LEAST = 0.85
"""Least throughput, as a part of the twin's, corrected for the hosts that were missing."""


def report(outcomes: list[Outcome]) -> int:
    """Print the results of the runs; return the exit code."""
    for outcome in outcomes:
        print(outcome)
    failed = any(outcome.complaints for outcome in outcomes)
    if len(outcomes) > 1:
        storm, twin = outcomes
        plain = storm.tokens_per_s / twin.tokens_per_s
        corrected = plain / storm.capacity
        print(
            f"throughput of the storm: {plain:.1%} of its twin's, "
            f"{corrected:.1%} of what the hosts that were there should do"
        )
        failed = failed or corrected < THROUGHPUT_LEAST
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Soak and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long the storm lasts (default: 5)")
    add("--pause", type=float, default=10.0, metavar="S", help="between two faults (default: 10)")
    add("--seed", type=int, default=1, help="decides who is struck, and how")
    add("--relays", type=int, nargs="+", default=[4, 3, 3], help="of each stage (default: 4 3 3)")
    add("--twin", action="store_true", help="run the same without faults beside it")
    add("--local", action="store_true", help="members step by themselves (DiLoCoX), with a twin")
    add("--no-networks", action="store_true", help="all on the loopback: no cuts, no root")
    add("--keep", type=Path, metavar="DIR", help="leave logs and state folders there")
    options = parser.parse_args(arguments)
    if not options.no_networks and (reason := missing()) is not None:
        print(f"no network can be laid out here: {reason}; try --no-networks", file=sys.stderr)
        return 1
    plan = Plan(
        relays=tuple(options.relays),
        storm_s=60 * options.minutes,
        pause_s=options.pause,
        seed=options.seed,
        twin=options.twin or options.local,
        local=options.local,
        networks=not options.no_networks,
    )
    with soak_folder(options.keep) as (folder, corpus):
        outcomes = soak(plan, folder, corpus)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
