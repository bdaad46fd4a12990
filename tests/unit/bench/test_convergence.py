"""The comparison of convergence trains what it says, and can be stopped."""

import json
import sys
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch

from decod.compression.plan import Method
from decod.config.presets import PRESETS
from decod.data.dataset import Dataset
from decod.ids import MicrobatchId
from decod.run.model_config import ModelDtype
from decod.run.run_config import RunConfig
from decod.run.training_config import SyncConfig, SyncMethod
from decod.train.diloco import DiLoCoState
from tests.support.diloco_reference import Reference
from tests.support.runs import prepare_corpus

ROOT = Path(__file__).resolve().parents[3]
DOCS, SCRIPTS = ROOT / "docs", ROOT / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

import bench_convergence  # noqa: E402
from bench.convergence import (  # noqa: E402
    NUM_REPLICAS,
    ROWS,
    SCALES,
    SEARCHED,
    Rates,
    Scale,
    known_rates,
    method_of,
    rates_of,
)
from bench.convergence_report import LINKS_MBIT, duration_s, equivalent, loss_of  # noqa: E402
from bench.replicas import Replicas  # noqa: E402

torch.set_num_threads(1)

SMALL = SCALES["small"]
EXACT = replace(SMALL, model=replace(SMALL.model, dtype=ModelDtype.FLOAT64))
NUM_ITERATIONS = 16


def make_run(sync: SyncConfig, scale: Scale = EXACT, length: int = NUM_ITERATIONS) -> RunConfig:
    run = method_of("all-reduce").run(scale, Rates(2e-3))
    optimizer = replace(run.optimizer, clip_norm=0.0, decay_iterations=length, warmup_iterations=1)
    return replace(run, sync=sync, optimizer=optimizer, num_iterations=length)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return Dataset.open(prepare_corpus(tmp_path_factory.mktemp("data")))


@pytest.mark.parametrize("delay", [0, 1, 3, 4])
def test_replicas_learn_what_diloco_by_hand_learns(dataset: Dataset, delay: int) -> None:
    """In float64, to the end of a run, which uses all averages. Without delay, nobody trains on."""
    run = make_run(SyncConfig(method=SyncMethod.DILOCO, every=4, overlap=delay > 0))
    replicas = Replicas(run, dataset, delay)
    reference = Reference(run.model, run.stages, run.optimizer, run.sync, seed=run.seed)
    for replica in range(NUM_REPLICAS):
        for stage in range(2):
            reference.add(f"{replica}.{stage}", stage)
    for iteration in range(1, run.num_iterations + 1):
        replicas.iterate()
        batch = [
            (
                dataset.microbatch(MicrobatchId(iteration, replica, 0), run.batch, run.seed),
                (f"{replica}.0", f"{replica}.1"),
            )
            for replica in range(NUM_REPLICAS)
        ]
        arrival = iteration > 4 and iteration % 4 == delay
        last = iteration == run.num_iterations
        reference.iterate(iteration, batch, arrival=arrival, last=last)
    for name, weights in replicas.weights().items():
        torch.testing.assert_close(weights, reference.anchors[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(),
        SyncConfig(compression=Method.COCKTAIL),
        SyncConfig(
            method=SyncMethod.DILOCO,
            every=3,
            overlap=True,
            compression=Method.LOWRANK_INT4,
            rank=8,
        ),
    ],
)
def test_a_training_that_was_stopped_goes_on_with_the_same_bits(
    dataset: Dataset, tmp_path: Path, sync: SyncConfig
) -> None:
    run = make_run(sync, SMALL, 9)
    replicas = Replicas(run, dataset)
    for _ in range(6):
        replicas.iterate()
    replicas.save(tmp_path / "checkpoint.safetensors", "so far")
    expected = [replicas.iterate() for _ in range(3)]
    others = Replicas(run, dataset)
    assert others.load(tmp_path / "checkpoint.safetensors") == "so far"
    assert [others.iterate() for _ in range(3)] == expected
    for name, weights in replicas.weights().items():
        assert torch.equal(others.weights()[name], weights)


def test_names_say_what_methods_are() -> None:
    found = method_of("h30-d5-int4")
    run = found.run(SMALL, Rates(1e-3, 0.4, 0.5))
    assert (run.sync.every, found.delay, run.sync.overlap) == (30, 5, True)
    assert (run.sync.compression, run.sync.outer_lr) == (Method.INT4, 0.4)
    assert method_of("h10-d10-back").goes_back
    assert method_of("h10-d2-late25").late == 0.25
    assert method_of("h10-muon-churn").anew == "churn"
    assert method_of("h10-resumed").anew == "resumed"
    quarter = method_of("all-reduce/4").run(SMALL, Rates(1e-3))
    assert quarter.num_iterations == round(SMALL.num_iterations / 4)
    for wrong in (
        "h1",
        "h10-d11",
        "h10-back",
        "h10-int3",
        "all",
        "h10 ",
        "h10-late50",
        "h10-d2-churn",
    ):
        with pytest.raises(ValueError, match="is no method"):
            method_of(wrong)


@pytest.mark.parametrize("scale", SCALES)
def test_every_row_has_rates(scale: str) -> None:
    for name in (*ROWS, *SEARCHED):
        method = method_of(name)
        assert method.run(SCALES[scale], rates_of(method, scale)).num_iterations >= 1
    assert {*known_rates(scale)} <= {*SEARCHED}


def test_a_loss_is_worth_the_iterations_that_come_to_it() -> None:
    references = {100: 3.0, 200: 2.0, 400: 1.5}
    assert equivalent(2.0, references) == pytest.approx(200)
    assert equivalent(1.75, references) == pytest.approx(200 * 2**0.5)
    assert equivalent(3.5, references) == pytest.approx(100 / 2**0.5)
    assert equivalent(1.25, references) == pytest.approx(400 * 2**0.5)


PRESETS_OF = {"all-reduce": "all-reduce", "h30-d5-muon-int4": "muloco"}
"""The presets that may be the fastest, by the method that is measured for each."""


def rows_of(document: str, heading: str) -> list[list[str]]:
    """The rows of the first table with a column of this name, the heads included."""
    lines = (DOCS / document).read_text("utf-8").splitlines()
    (first,) = [at for at, line in enumerate(lines) if line.startswith("|") and heading in line]
    rows = takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_page_on_slow_links_names_the_fastest_presets() -> None:
    heads, _, *measured = rows_of("research/benchmarks.md", "iterations of all-reduce, of 100")
    _, _, *told = rows_of("slow-links.md", "fastest preset")
    assert [int(row[0].split()[0].replace(",", "")) for row in told] == list(LINKS_MBIT)
    for mbit, (_, _, preset, progress) in zip(LINKS_MBIT, told, strict=True):
        column = heads.index(f"progress at {mbit} Mbit/s")
        best = max(measured, key=lambda row: float(row[column]))
        assert preset == f"`{PRESETS_OF[best[0].strip('`')]}`"
        assert float(progress) == pytest.approx(float(best[column]), rel=0.05)
    method = method_of("h30-d5-muon-int4").run(SCALES["300k"], Rates(1e-3, 0.7, 0.7))
    preset = PRESETS["muloco"]
    assert method.sync == replace(preset.sync, rank=method.sync.rank)
    assert method.optimizer.name is preset.optimizer.name
    assert method.optimizer.beta1 == preset.optimizer.beta1


def test_members_wait_for_what_takes_longer_than_the_delay() -> None:
    """An average of 4 MB, of which a member sends three quarters: 3 s at 8 Mbit/s."""
    result = {"average_bytes": 4e6, "delay": 2}
    result["settings"] = {"sync.every": 10, "num_iterations": 100}
    for compute_s, phase_s in ((1.0, 11.0), (2.0, 20.0), (0.1, 3.8)):
        assert duration_s(result, compute_s, 8.0) == pytest.approx(10 * phase_s)


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_what_came_too_late_counts_in_the_next_average(dataset: Dataset, late: float) -> None:
    """The last replica misses the first average, but not the second one."""
    sync = SyncConfig(
        method=SyncMethod.DILOCO, every=2, overlap=True, outer_lr=1.0, outer_momentum=0.0
    )
    replicas = Replicas(make_run(sync, length=8), dataset, 1, late=late)
    missed = torch.zeros(())
    for num in (3, 4):
        while replicas.phase_end != replicas.iteration or not replicas.iteration:
            replicas.iterate()
        states = [chain[1]._built.state.committed for chain in replicas._chains]
        assert all(isinstance(state, DiLoCoState) for state in states)
        sums, before = [state.sending for state in states], states[0].anchor.clone()
        replicas.iterate()
        expected = before - (sum(sums[:num]) + missed) / (2 * num)
        after = replicas._chains[0][1]._built.state.committed.anchor
        torch.testing.assert_close(after, expected, rtol=0, atol=1e-12)
        missed = late * sums[-1]


@pytest.mark.parametrize(
    ("anew", "num_steps"), [("churn", [4, 2, 0, 4]), ("resumed", [0] * 4), ("", [4] * 4)]
)
def test_who_begins_anew_has_no_moments(anew: str, num_steps: list[int], dataset: Dataset) -> None:
    run = replace(make_run(SyncConfig(method=SyncMethod.DILOCO, every=2)), num_iterations=8)
    replicas = Replicas(run, dataset, anew=anew)
    for _ in range(4):
        replicas.iterate()
    inner = [chain[0]._built.state.committed.inner for chain in replicas._chains]
    assert [each.num_steps for each in inner] == num_steps
    for each in inner:
        assert each.moments[0].any() == (each.num_steps > 0)


@pytest.mark.slow
def test_the_comparison_puts_methods_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest model. What is finished is not trained again."""
    monkeypatch.setattr("bench.convergence.RATES_FILE", tmp_path / "rates.json")
    cache = ["--small", "--cache", str(tmp_path)]
    assert bench_convergence.main([*cache, "--search", "h10-d2"]) == 0
    best = known_rates("small")["h10-d2"]
    assert json.loads((tmp_path / "rates.json").read_text())["small"]["h10-d2"]["trials"][0] == [
        best.inner,
        best.outer,
        best.momentum,
        pytest.approx(min(map(loss_of, searched(tmp_path))), abs=1e-4),
    ]
    rows = ("all-reduce", "all-reduce/4", "h10", "h10-d2", "h10-d10-back-lowrank", "cocktailsgd")
    arguments = [*cache, "--plot", str(tmp_path / "losses.svg"), "--method", *rows]
    assert bench_convergence.main(arguments) == 0
    text = capsys.readouterr().out
    losses = {}
    for name in rows:
        result = tmp_path / "small" / f"{name.replace('/', '_')}-s0.json"
        losses[name] = loss_of(json.loads(result.read_text()))
        assert f"| {name} |" in text
        assert f"{losses[name]:.4f}" in text
    assert losses["all-reduce"] < losses["all-reduce/4"]
    assert losses["all-reduce"] < losses["h10-d10-back-lowrank"]
    assert "<svg" in (tmp_path / "losses.svg").read_text()
    assert not list((tmp_path / "small").glob("*.safetensors"))
    assert bench_convergence.main([*arguments, "--report"]) == 0
    assert capsys.readouterr().out.count("held-out loss") == 0


def searched(cache: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (cache / "small").glob("search-*.json")]
