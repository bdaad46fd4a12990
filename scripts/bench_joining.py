"""Times a newcomer: `python scripts/bench_joining.py`.

A leader and two relays train a small model on the loopback. Then somebody pastes
`decod join JOINSTRING`, and nothing else, with an empty home. The table shows when the newcomer got
how far, in seconds since the command began, over several newcomers one after another.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.cluster import DECOD, Cluster, Daemon, child_environment, takes_part  # noqa: E402
from tests.support.polling import wait_for  # noqa: E402
from tests.support.runs import make_run, prepare_corpus  # noqa: E402

_MILESTONES = {
    "node.started": "listens",
    "stage.assigned": "has a stage",
    "state.loaded": "has the stage's state",
    "step.committed": "trains",
}
"""Events of a newcomer's log in their order, and what they mean."""

_TIMEOUT_S = 120.0


def paste(join_string: str, home: Path) -> dict[str, float]:
    """Join from an empty home, and leave again; return the seconds to each milestone."""
    home.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "DECOD_"))}
    begin_s = time.monotonic()
    command = [*DECOD, "join", join_string]
    with (home / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, "HOME": str(home), "PYTHONPATH": child_environment()["PYTHONPATH"]},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    newcomer = Daemon("newcomer", process, home, begin_s)
    (home / "state").symlink_to(home / ".local/state/decod")
    reached = {}
    try:
        for event, meaning in _MILESTONES.items():
            wait_for(partial(newcomer.events, event), meaning, timeout_s=_TIMEOUT_S)
            reached[meaning] = time.monotonic() - begin_s
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_TIMEOUT_S)
    return reached


def main(arguments: Sequence[str]) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--newcomers", type=int, default=5, help="how many (default: 5)")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster(
            folder / "run", make_run(min_nodes_per_stage=1), prepare_corpus(folder), fork=False
        ) as cluster:
            leader = cluster.start_leader()
            for daemon in (leader, *cluster.start_relays(1)):
                present = partial(takes_part, cluster, daemon)
                cluster.wait_for(present, daemon.name, timeout_s=_TIMEOUT_S)
            join_string = cluster.join_string(leader) or ""
            homes = [folder / f"home-{number}" for number in range(options.newcomers)]
            rows = [paste(join_string, home) for home in homes]
    print("commands: 1 (decod join JOINSTRING)")
    print(f"{'the newcomer':24}{'median, s':>10}{'most, s':>10}")
    for meaning in _MILESTONES.values():
        times = [row[meaning] for row in rows]
        print(f"{meaning:24}{median(times):10.1f}{max(times):10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
