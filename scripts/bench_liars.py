"""Has a relay lie in real runs, and shows when it is found and what stays of its lies.

    python scripts/bench_liars.py
    python scripts/bench_liars.py --lies mean stale --rounds 3

A leader and six relays, three in each of two stages, train a small model on the loopback. One relay
lies from iteration `--from` on, as `tests/support/lying.py` says. Shares of audited work are the
defaults, so all relays are in probation. The losses at the end are compared with those of one
process that trains alone. Exits with 1 if another relay was named, or if none was.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from decod.run.protocol_config import AuditConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.cluster import Cluster  # noqa: E402
from tests.support.lying import LIES, MEAN  # noqa: E402
from tests.support.runs import make_run, prepare_corpus, reference  # noqa: E402

HONEST = (("one", 1), ("two", 1), ("three", 2), ("four", 2), ("five", 2))
NUM_LAST = 5
"""Losses at the end that are compared."""


def measure(lie: str, begin: int, num_iterations: int, folder: Path) -> bool:
    """Run one liar, print what became of it, and return whether it alone was named."""
    corpus = prepare_corpus(folder)
    run = make_run(num_iterations=num_iterations, min_nodes_per_stage=3)
    with Cluster(folder, replace(run, audits=AuditConfig()), corpus) as cluster:
        leader = cluster.start_leader()
        program = (sys.executable, "-u", "-m", "tests.support.lying", str(begin), lie)
        liar = cluster.start_relay("liar", "--stage", "1", program=program)
        for name, stage in HONEST:
            cluster.start_relay(name, "--stage", str(stage))
        leader.wait(timeout_s=300.0)
        named = [event["peer"] for event in leader.events("relay.lied")]
        repeated = [event["iteration"] for event in leader.events("iteration.aborted")]
        found, alone = leader.losses(), reference(cluster.run, corpus, num_iterations)[0]
        right = named == [liar.membership().node_id]
    last = sorted(found)[-NUM_LAST:]
    off = mean(found[k] for k in last) / mean(alone[k - 1] for k in last) - 1
    what = "named alone" if right else f"NOT named alone: {named}"
    print(f"{lie:8} {what}, repeated iterations {repeated}, loss {off:+.3%}", flush=True)
    return right


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    all_lies = [*LIES, MEAN]
    parser.add_argument("--lies", nargs="+", choices=all_lies, default=all_lies)
    parser.add_argument("--from", type=int, default=20, dest="begin", help="first false iteration")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options, right = parse_options(arguments), True
    for _ in range(options.rounds):
        for lie in options.lies:
            with tempfile.TemporaryDirectory() as folder:
                right &= measure(lie, options.begin, options.iterations, Path(folder))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
