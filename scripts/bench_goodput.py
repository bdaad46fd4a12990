"""Measures goodput: the tokens that enter the model, over those of the same hosts undisturbed.

    python scripts/bench_goodput.py simulate
    python scripts/bench_goodput.py simulate --members 1000 --faults failures
    python scripts/bench_goodput.py run
    python scripts/bench_goodput.py run --seconds 60 --ways all-reduce

`simulate` runs the real protocol in virtual time, with 10, 100 or 1,000 members. They fail or slow
down as in Decoupled DiLoCo (arXiv:2604.21428). `run` trains with real daemons over loopback. It
kills a relay every 15 s, and starts it again at once. Speed and loss are compared with those of an
undisturbed run. Both commands measure all-reduce, synchronous DiLoCo, and DiLoCo with a quorum.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.child import BenchError, stop_all_at_exit
from bench.goodput import (
    CONDITIONS,
    DURATIONS_S,
    WAYS,
    Goodput,
    goodput_of,
    scenario,
    simulate,
)
from bench.kills import Outcome, measure, shorten

UNDISTURBED_S = 60.0
"""Of virtual time. Undisturbed iterations are alike."""


def run_simulations(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a line for each disturbed run; return all results."""
    results = []
    print(
        "members  way                 faults       goodput  of present    lost    down  joining"
        "    rest  failures  mended  repeated  iterations  real s"
    )
    for num_members in options.members:
        duration_s = options.seconds or DURATIONS_S.get(num_members, 300.0)
        for way in WAYS:
            if way.name not in options.ways:
                continue
            start_s = time.monotonic()
            seed = options.seed
            plain = scenario(num_members, way, (), seed=seed, duration_s=UNDISTURBED_S)
            undisturbed = simulate(plain)
            for name in options.faults:
                kinds = CONDITIONS[name]
                planned = scenario(num_members, way, kinds, seed=seed, duration_s=duration_s)
                disturbed = simulate(planned)
                found = goodput_of(disturbed, undisturbed)
                real_s, start_s = time.monotonic() - start_s, time.monotonic()
                print(
                    f"{num_members:7}  {way.name:18}  {name:11}  {_shares(found)}"
                    f"  {disturbed.num_failures:8}  {disturbed.num_mended:6}"
                    f"  {disturbed.num_repeated:8}  {disturbed.num_iterations:10}  {real_s:6.0f}",
                    flush=True,
                )
                results.append(
                    {
                        "members": num_members,
                        "way": way.name,
                        "faults": name,
                        "goodput": asdict(found) | {"of_present": found.of_present},
                        "undisturbed": asdict(undisturbed),
                        "disturbed": asdict(disturbed),
                    }
                )
    return results


def _shares(found: Goodput) -> str:
    return (
        f"{found.goodput:7.3f}  {found.of_present:10.3f}  {found.lost:6.3f}  {found.down:6.3f}"
        f"  {found.joining:7.3f}  {found.rest:6.3f}"
    )


def run_daemons(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Train with and without kills, for each way; print and return the results.

    Raises:
        BenchError: A run could not be measured.
    """
    results = []
    for way in WAYS:
        if way.name not in options.ways:
            continue
        seconds, name = options.seconds or 60.0, way.name.replace(" ", "-")
        disturbed = measure(
            folder / f"{name}-kills", way, seconds, kill_every_s=options.kill_every_s
        )
        _show(way.name, "kills", disturbed)
        plain = measure(folder / name, way, seconds, kill_every_s=0.0)
        _show(way.name, "undisturbed", plain)
        ours, theirs = shorten(disturbed, plain)
        goodput = disturbed.kept_per_s / plain.kept_per_s
        difference = ours / theirs - 1
        print(f"{way.name}: goodput {goodput:.3f}, loss {difference:+.2%} after as many tokens")
        results.append(
            {
                "way": way.name,
                "goodput": goodput,
                "loss_difference": difference,
                "disturbed": asdict(disturbed),
                "undisturbed": asdict(plain),
            }
        )
    return results


def _show(way: str, kind: str, outcome: Outcome) -> None:
    print(
        f"{way:18}  {kind:11}  {outcome.tokens_per_s:7.0f} tokens/s in {outcome.duration_s:.0f} s,"
        f" {outcome.num_lost} microbatches lost, {outcome.num_late} late;"
        f" {len(outcome.losses)} iterations, {outcome.num_kills} kills,"
        f" {outcome.num_mended} mended, {outcome.num_repeated} repeated;"
        f" away {outcome.away:.3f}, loss {outcome.last_loss:.4f}",
        flush=True,
    )


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--seconds", type=float, help="of each run with faults, measured")
    names = [way.name for way in WAYS]
    both.add_argument("--ways", nargs="+", choices=names, default=names, help="(default: all)")
    both.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parts = parser.add_subparsers(dest="what", required=True)
    virtual = parts.add_parser("simulate", parents=[both], help="in virtual time")
    add = virtual.add_argument
    add("--members", type=int, nargs="+", default=[10, 100], help="(default: 10 100)")
    faults = [name for name, kinds in CONDITIONS.items() if kinds]
    add("--faults", nargs="+", choices=faults, default=["failures"], help="(default: failures)")
    add("--seed", type=int, default=1, help="of all draws (default: 1)")
    real = parts.add_parser("run", parents=[both], help="with real daemons")
    add = real.add_argument
    add("--kill-every-s", type=float, default=15.0, help="(default: 15)")
    add("--keep", type=Path, metavar="DIR", help="keep logs and state in this new folder")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    options = parse_options(arguments)
    try:
        if options.what == "simulate":
            results = run_simulations(options)
        else:
            stop_all_at_exit()
            # State folders hold sockets, whose paths must be short.
            with tempfile.TemporaryDirectory(prefix="decod-goodput-") as name:
                folder = options.keep or Path(name)
                folder.mkdir(parents=True, exist_ok=True)
                results = run_daemons(options, folder.resolve())
    except BenchError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
