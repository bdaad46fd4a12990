"""Measures routing with real daemons on unequal links: `flow` and `gwtf` beside `greedy`.

    sudo python scripts/bench_routing.py
    sudo python scripts/bench_routing.py --seeds 1 --json result.json

One data node and two stages of three relays, each a `decod` process in a network namespace, with
links of 5 to 80 Mbit/s drawn for each seed and activations of 512 KiB. For each seed all routings
train the same model on the same network; with `flow` one link that flows use is then cut to a
tenth, and iterations are counted until none does. The optimum and a greedy routing that knows all
links stand beside them. Five minutes a seed. Exits with 1 if `flow` or `gwtf` cost more than
`greedy` in any seed, if `flow` took longer, or if a link was not left within five iterations.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.child import stop_all_at_exit  # noqa: E402

from tests.support import routing_trial as trials  # noqa: E402
from tests.support.network import missing  # noqa: E402
from tests.support.runs import prepare_corpus  # noqa: E402

ROUTINGS = ("greedy", "gwtf", "flow")
LEFT_AFTER_MAX = 5
_LOOK_MAX = 15
"""After this many iterations, a link counts as never left."""


@dataclass(frozen=True, slots=True)
class Result:
    """The results of one seed."""

    seed: int
    found: trials.Comparison
    greedy_informed_cost_s: float
    """Mean cost of a flow by a greedy routing that knows all links."""
    optimum_cost_s: float
    """The least mean cost of any routing."""

    @property
    def passed(self) -> bool:
        """Whether `flow` was better in all measurements."""
        by_routing, left_after = self.found.by_routing, self.found.left_after
        greedy, gwtf, flow = (by_routing[name] for name in ROUTINGS)
        better = max(flow.cost_s, gwtf.cost_s) < greedy.cost_s
        better = better and flow.iteration_s < greedy.iteration_s
        return better and left_after is not None and left_after <= LEFT_AFTER_MAX


def measure(seed: int, folder: Path, corpus: Path) -> Result:
    """Run all routings on the links of one seed."""
    rates = trials.draw_rates(seed)
    found = trials.compare(folder, corpus, rates, num_max=_LOOK_MAX, routings=ROUTINGS)
    return Result(seed, found, trials.greedy_s(rates), trials.optimum_s(rates))


HEADER = f"""\
{"":4}  {"cost of a flow, s":^39}  {"iteration, s":^20}  {"link at a tenth":^15}
{"seed":4}  {"greedy":>6} {"gwtf":>6} {"flow":>6} {"informed":>9} {"optimum":>8}  \
{"greedy":>6} {"gwtf":>6} {"flow":>6}  {"left after":>15}"""


def as_line(result: Result) -> str:
    """Return one seed's line of the table."""
    measured = [result.found.by_routing[name] for name in ROUTINGS]
    left_after = result.found.left_after
    left = "never" if left_after is None else f"{left_after} iterations"
    costs = " ".join(f"{found.cost_s:6.3f}" for found in measured)
    lengths = " ".join(f"{found.iteration_s:6.2f}" for found in measured)
    return (
        f"{result.seed:4}  {costs} {result.greedy_informed_cost_s:9.3f}"
        f" {result.optimum_cost_s:8.3f}  {lengths}  {left:>15}"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], help="networks (default: 1 2 3)")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE; - for stdout")
    options = parser.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"no network can be laid out here: {reason}", file=sys.stderr)
        return 1
    stop_all_at_exit()
    results: list[Result] = []
    # State folders hold sockets, whose paths must be short. So not below a deep working directory.
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        corpus = prepare_corpus(folder / "data")
        print(HEADER, flush=True)
        for seed in options.seeds:
            results.append(measure(seed, folder / str(seed), corpus))
            print(as_line(results[-1]), flush=True)
    if options.json is not None:
        text = json.dumps([{**asdict(r), "passed": r.passed} for r in results], indent=1)
        if str(options.json) == "-":
            print(text)
        else:
            options.json.write_text(text + "\n", encoding="utf-8")
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
