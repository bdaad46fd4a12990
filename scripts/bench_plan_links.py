"""Compares the planner's prediction for layouts of servers and clients with real runs.

    sudo python scripts/bench_plan_links.py
    python scripts/bench_plan_links.py --predict-only
    sudo python scripts/bench_plan_links.py --layouts A E --iterations 4

Eight hosts, each a network namespace with an access of its own rate: one data node, four servers
and three clients. They share the processors of this machine, so activations are large and passes
short: the network decides. Each layout is run by daemons. The time of an iteration is the median
between two commits, after a warm-up.

The prediction rests on the rates of the links, and on the processor time of a pass on this machine.
In the layouts of `RELAYED` servers are paused: they compute nothing, so all work goes to clients.
Exits with 1 if an error is above 15 %, or if the layout that the
planner calls best is more than 3 % slower than the best.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from typing_extensions import override

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.daemon.control import ask  # noqa: E402
from decod.ids import NodeId  # noqa: E402
from decod.lab.planner.hosts import HostKind, TrainingHost, TrainingProblem, TrainingWork  # noqa: E402
from decod.lab.planner.servers.objective import IterationTime, iteration_time_s  # noqa: E402
from decod.lab.planner.servers.servers_layout import ServedStage, ServersLayout, broken_rules  # noqa: E402
from decod.model.shape import model_shapes  # noqa: E402
from decod.model.stage import (  # noqa: E402  # noqa: E402
    FirstStage,
    empty_model,
    initial_weight,
)
from decod.run.model_config import ModelConfig  # noqa: E402
from decod.run.protocol_config import NO_AUDITS, ProtocolConfig  # noqa: E402
from decod.run.run_config import Organisation, RunConfig  # noqa: E402
from decod.run.stages_config import StagesConfig  # noqa: E402
from decod.run.training_config import BatchConfig, OptimizerConfig  # noqa: E402
from tests.support.cluster import Cluster, Daemon, stage_nodes  # noqa: E402
from tests.support.history import read_records  # noqa: E402
from tests.support.network import Network, missing  # noqa: E402
from tests.support.runs import prepare_corpus  # noqa: E402

ERROR_MOST = 0.15
SLOWER_MOST = 0.03

MODEL = ModelConfig(
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
BATCH = BatchConfig(sequence_length=64, microbatch_size=32, num_microbatches=12)
"""An activation is of 1 MiB, and a layer of 353 KiB."""

PROTOCOL = ProtocolConfig(
    heartbeat_timeout_s=30.0,
    probe_timeout_s=20.0,
    election_timeout_s=30.0,
    admission_interval_s=0.2,
    snapshot_every_iterations=0,
)
"""Nothing is lost here, and states that are mirrored would take the links from training."""

DATA = "data"
MBIT_PER_S = {
    DATA: 100.0,
    "s1": 60.0,
    "s2": 40.0,
    "s3": 50.0,
    "s4": 30.0,
    "c1": 50.0,
    "c2": 30.0,
    "c3": 20.0,
}
"""What each host sends, and what it receives."""

LAYOUTS = {
    "A": "s1 / s3 / c1 c2 c3",
    "B": "s4 / s1 / c1 c2 c3",
    "C": "s1 s3 / s2 s4 / c1 c2 c3",
    "D": "s1 s2 / s3 / c1 c2 c3",
    "E": "s1 / s1 / c1 c2 c3",
    "F": "s3 / s3 / c1 c2",
    "G": "s1 / s3 / c1 c2, s2 / s4 / c3",
    "H": "s1 / s1 / c1 c2, s3 / s3 / c3",
    "I": "s1 / s1 / , s3 / s3 / ",
    "J": "s1 / s2 / c1, s3 / s4 / c2 c3",
}
"""Frontal servers, backward servers and clients of each stage. Who is not named is idle."""

RELAYED = {
    "K": "s1 / s3 / c1 c2 c3",
    "L": "s1 s3 / s2 / c1 c2 c3",
    "M": "s1 / s3 / c1, s2 / s4 / c2 c3",
}
"""The same, with servers that are paused: all work goes to the clients."""

NAMED = LAYOUTS | RELAYED

_MEASURE_S = 1.0
_BYTES_PER_S = 0.955e6 / 8
"""Of a Mbit/s, without the headers of Ethernet, IP and TCP."""
_ITERATION_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A layout's run."""

    times_s: list[float]
    """Of its iterations after the warm-up."""
    folded: dict[str, float]
    """How many microbatches of an iteration each worker has folded in, as a mean."""

    @property
    def iteration_s(self) -> float:
        return median(self.times_s)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of one processor for a microbatch, forward and backward."""

    layer_s: float
    head_s: float


def layout_of(text: str) -> ServersLayout:
    """Read an entry of `LAYOUTS`."""
    stages = text.split(",")
    made = []
    for stage in stages:
        frontal, backward, clients = (tuple(map(NodeId, part.split())) for part in stage.split("/"))
        num_layers = MODEL.num_hidden_layers // len(stages)
        made.append(
            ServedStage(num_layers=num_layers, frontal=frontal, backward=backward, clients=clients)
        )
    return ServersLayout(tuple(made))


def measure_passes() -> PassTimes:
    """Measure on one thread."""
    torch.set_num_threads(1)
    model = empty_model(MODEL)
    shapes = model_shapes(MODEL).items()
    model.place({n: initial_weight(MODEL, seed=1, name=n, shape=s) for n, s in shapes})
    tokens = torch.zeros(BATCH.microbatch_size, BATCH.sequence_length, dtype=torch.long)
    hidden = torch.randn(*tokens.shape, MODEL.hidden_size)
    layer_s = _median_s(lambda: _layers(model, hidden)) / MODEL.num_hidden_layers
    head_s = _median_s(lambda: _ends(model, tokens, hidden))
    return PassTimes(layer_s, head_s)


def _layers(model: FirstStage, hidden: torch.Tensor) -> None:
    entry = hidden.clone().requires_grad_()
    output = model.run_blocks(entry)
    torch.autograd.backward(output, torch.ones_like(output))


def _ends(model: FirstStage, tokens: torch.Tensor, hidden: torch.Tensor) -> None:
    embedded = model.embed(tokens)
    torch.autograd.backward(embedded, torch.ones_like(embedded))
    torch.autograd.backward(model.loss(hidden.clone().requires_grad_(), tokens))


def _median_s(work: Callable[[], None]) -> float:
    work()
    times, end_s = [], time.monotonic() + _MEASURE_S
    while time.monotonic() < end_s:
        start_s = time.thread_time()
        work()
        times.append(time.thread_time() - start_s)
    return median(times)


def problem_of(passes: PassTimes, *, servers_compute: bool) -> TrainingProblem:
    """Return the hosts and the work as the planner sees them."""

    def kind(name: str) -> HostKind:
        kinds = {"d": HostKind.DATA, "s": HostKind.RELIABLE, "c": HostKind.UNRELIABLE}
        return kinds[name[0]]

    hosts = [
        TrainingHost(
            host_id=NodeId(name),
            kind=kind(name),
            speed_layers_per_s=1 / passes.layer_s if servers_compute or name[0] != "s" else 0.0,
            uplink_bytes_per_s=rate * _BYTES_PER_S,
            downlink_bytes_per_s=rate * _BYTES_PER_S,
        )
        for name, rate in MBIT_PER_S.items()
    ]
    everyone = range(len(hosts))
    # Nothing but the access limits a link.
    free = [[1e9 * (i != j) for j in everyone] for i in everyone]
    none = [[0.0 for _ in everyone] for _ in everyone]
    hidden, layers = MODEL.hidden_size, MODEL.num_hidden_layers
    tokens = BATCH.microbatch_size * BATCH.sequence_length
    weights = 4 * hidden * hidden + 3 * hidden * MODEL.intermediate_size + 2 * hidden
    work = TrainingWork(
        num_layers=layers,
        num_microbatches=BATCH.num_microbatches,
        activation_bytes=4.0 * tokens * hidden,
        layer_bytes=4.0 * weights,
        delay=0,
        head_s=passes.head_s,
    )
    return TrainingProblem(hosts, none, free, work)


def run_of(layout: ServersLayout) -> RunConfig:
    """Return the run of a layout."""
    return RunConfig(
        name="links",
        model=MODEL,
        organisation=Organisation.SERVERS,
        stages=StagesConfig(num_relay_stages=len(layout.stages)),
        batch=BATCH,
        optimizer=OptimizerConfig(lr=1e-3),
        protocol=replace(
            PROTOCOL, min_nodes_per_stage=min(len(stage.servers) for stage in layout.stages)
        ),
        audits=NO_AUDITS,
    )


def start_hosts(cluster: Cluster, layout: ServersLayout, *, servers_compute: bool) -> Daemon:
    """Start the hosts of a layout, and wait until all are members. Return the leader."""
    leader = cluster.start_leader(name=DATA)
    names = []
    for index, stage in enumerate(layout.stages, start=1):
        for server in stage.servers:
            both = server in stage.frontal and server in stage.backward
            duty = "frontal" if server in stage.frontal else "backward"
            arguments = () if both else ("--duty", duty)
            cluster.start_relay(server, "--server", "--stage", str(index), *arguments)
        for client in stage.clients:
            cluster.start_relay(client, "--stage", str(index))
        names += [*stage.servers, *stage.clients]

    def all_in() -> bool:
        status = leader.try_status()
        return status is not None and {*names} <= {n["name"] for n in stage_nodes(status)}

    cluster.wait_for(all_in, "all hosts", timeout_s=120.0)
    if not servers_compute:
        servers = {server for stage in layout.stages for server in stage.servers}
        for daemon in cluster.daemons:
            if daemon.name in servers:
                ask(daemon.state_dir, {"command": "pause"}, timeout_s=10.0)
    return leader


def measure(
    name: str, layout: ServersLayout, folder: Path, corpus: Path, num: tuple[int, int]
) -> Measured:
    """Run a layout.

    Args:
        name: Of the layout.
        layout: The layout.
        folder: For state and logs.
        corpus: Prepared data.
        num: Iterations to warm up, and to measure.
    """
    num_warmup, num_measured = num
    used = {DATA, *(h for stage in layout.stages for h in (*stage.servers, *stage.clients))}
    hosts = [host for host in MBIT_PER_S if host in used]
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts, {}, access=MBIT_PER_S))
        cluster = stack.enter_context(Cluster(folder / name, run_of(layout), corpus, network))
        leader = start_hosts(cluster, layout, servers_compute=name in LAYOUTS)
        first = leader.iteration + num_warmup
        last = first + num_measured
        cluster.wait_for_iteration(last, timeout_s=(last + 1) * _ITERATION_MAX_S)
        # They have nothing to say goodbye for.
        for daemon in cluster.daemons:
            daemon.send(signal.SIGKILL)
            daemon.wait()
        folded = {d.name: mean(_folded(d, num_measured)) for d in cluster.daemons if d != leader}
        ends = [datetime.fromisoformat(c["time"]) for c in commits_of(leader)][first - 1 : last]
        return Measured([(b - a).total_seconds() for a, b in pairwise(ends)], folded)


def commits_of(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the records of a node's commits."""
    records = read_records(daemon.state_dir)
    return [record for record in records if record.get("event") == "step.committed"]


def _folded(daemon: Daemon, num_last: int) -> list[int]:
    return [commit.get("num_folded", 0) for commit in commits_of(daemon)[-num_last:]]


def main(arguments: Sequence[str]) -> int:
    """Predict, measure and compare; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layouts", nargs="+", default=[*NAMED], metavar="NAME", help="(default: all)")
    add("--warmup", type=int, default=3, help="iterations that don't count (default: 3)")
    add("--iterations", type=int, default=8, help="measured iterations (default: 8)")
    add("--predict-only", action="store_true", help="run nothing")
    add("--keep", type=Path, metavar="DIR", help="leave logs and state folders there")
    add("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    options = parser.parse_args(arguments)
    if not options.predict_only and (reason := missing()) is not None:
        print(f"no network can be laid out here: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    passes = measure_passes()
    layer_ms, head_ms = passes.layer_s * 1e3, passes.head_s * 1e3
    print(f"a layer takes {layer_ms:.0f} ms, embedding and head {head_ms:.0f} ms")
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="decod-bench-") as name:
        folder = options.keep or Path(name)
        (folder / "data").mkdir(parents=True)
        corpus = prepare_corpus(folder / "data")
        for key in options.layouts:
            layout, problem = (
                layout_of(NAMED[key]),
                problem_of(passes, servers_compute=key in LAYOUTS),
            )
            assert not broken_rules(problem, layout), (key, broken_rules(problem, layout))
            predicted = iteration_time_s(problem, layout)
            print(as_prediction(key, predicted, problem), flush=True)
            if not options.predict_only:
                num = options.warmup, options.iterations
                found = measure(key, layout, folder, corpus, num)
                rows[key] = Row(predicted.total_s, found)
                print(f"   {rows[key]}", flush=True)
    if options.json is not None:
        text = json.dumps({key: asdict(row) for key, row in rows.items()}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if options.predict_only else verdict(rows)


def as_prediction(key: str, predicted: IterationTime, problem: TrainingProblem) -> str:
    """Return what the planner expects of a layout."""
    shares = [dict(stage.shares) for stage in predicted.stages]
    hosts = {problem.hosts[i].host_id: num for each in shares for i, num in each.items()}
    kind, host = predicted.bottleneck.kind, predicted.bottleneck.host_id or ""
    line = f"{key}  {NAMED[key]:34} predicted {predicted.total_s:5.2f} s"
    return f"{line}  waits for {kind} {host}; microbatches {_listed(hosts)}"


def _listed(shares: Mapping[Any, float]) -> str:
    return " ".join(f"{host}:{num:.3g}" for host, num in sorted(shares.items()))


@dataclass(frozen=True, slots=True)
class Row:
    """One layout, predicted and measured."""

    predicted_s: float
    measured: Measured

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measured time."""
        return self.predicted_s / self.measured.iteration_s - 1

    @override
    def __str__(self) -> str:
        times_s = self.measured.times_s
        line = f"measured {self.measured.iteration_s:.2f} s ({min(times_s):.2f} to"
        line += f" {max(times_s):.2f}), error {self.error:+.0%}; microbatches"
        return f"{line} {_listed(self.measured.folded)}"


def verdict(rows: dict[str, Row]) -> int:
    """Print how good the predictions are; return the exit code."""
    errors = [abs(row.error) for row in rows.values()]
    num_good = sum(error <= ERROR_MOST for error in errors)
    print(
        f"error: mean {mean(errors):.1%}, largest {max(errors):.1%}, "
        f"{num_good} of {len(errors)} within {ERROR_MOST:.0%}"
    )
    failed = num_good < len(errors)
    for kind in (LAYOUTS, RELAYED):
        measured = {key: rows[key].measured.iteration_s for key in kind if key in rows}
        if len(measured) > 1:
            chosen = min(measured, key=lambda key: rows[key].predicted_s)
            best = min(measured, key=measured.__getitem__)
            slower = measured[chosen] / measured[best] - 1
            print(f"the planner prefers {chosen}: {slower:.1%} slower than the best, {best}")
            failed = failed or slower > SLOWER_MOST
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
