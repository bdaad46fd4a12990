"""Trains with servers and clients while clients are killed, and says what was lost.

    python scripts/soak_servers.py --minutes 5 --twin
    python scripts/soak_servers.py --minutes 2 --servers

One data node, two servers in each of two stages, and six clients: eleven hosts, each two processes,
all on the loopback. Every ten seconds a client is killed, and started again four seconds later with
its state folder. With `--servers`, every fourth victim is a server. With `--twin`, the same run
goes on without faults afterwards.

What all nodes have logged is audited afterwards. The sums that servers have averaged must be the
batch, and what each worker says that it has folded. The losses are compared with those of one
process. Exits with 1 if anything was lost, or if the storm has cost more time, memory or open files
than it may: see `tests/support/soak.py`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.soak import Outcome, soak_folder  # noqa: E402
from tests.support.soak_servers import ServersPlan, soak_servers  # noqa: E402

THROUGHPUT_LEAST = 0.85
"""Least throughput, as a part of the twin's."""


def report(outcomes: list[tuple[Outcome, list[float]]]) -> int:
    """Print the results of the runs; return the exit code."""
    for outcome, iterations_s in outcomes:
        print(outcome)
        print(
            f"  iterations: median {median(iterations_s):.2f} s, longest {max(iterations_s):.2f} s"
        )
    failed = any(outcome.complaints for outcome, _ in outcomes)
    if len(outcomes) > 1:
        (storm, _), (twin, _) = outcomes
        part = storm.tokens_per_s / twin.tokens_per_s
        print(f"throughput of the storm: {part:.1%} of its twin's")
        failed = failed or part < THROUGHPUT_LEAST
    return int(failed)


def main(arguments: Sequence[str]) -> int:
    """Soak and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long the storm lasts (default: 5)")
    add("--pause", type=float, default=10.0, metavar="S", help="between two kills (default: 10)")
    add("--seed", type=int, default=1, help="decides who is killed")
    add("--clients", type=int, default=6, help="of both stages together (default: 6)")
    add("--microbatches", type=int, default=32, help="of an iteration (default: 32)")
    add("--servers", action="store_true", help="kill servers, too")
    add("--twin", action="store_true", help="run the same without kills afterwards")
    add("--no-fork", action="store_true", help="start each daemon by itself, as an operator would")
    add("--keep", type=Path, metavar="DIR", help="leave logs and state folders there")
    options = parser.parse_args(arguments)
    plan = ServersPlan(
        num_clients=options.clients,
        num_microbatches=options.microbatches,
        storm_s=60 * options.minutes,
        pause_s=options.pause,
        seed=options.seed,
        servers=options.servers,
        twin=options.twin,
        fork=not options.no_fork,
    )
    with soak_folder(options.keep) as (folder, corpus):
        outcomes = soak_servers(plan, folder, corpus)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
