"""What the tests with real processes share."""

import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.runs import make_run, prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, the same for all runs."""
    return prepare_corpus(tmp_path_factory.mktemp("data"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows beside a failure what the daemons wrote last."""
    report = yield
    if report.failed:
        report.sections += [("daemons", living.tails()) for living in cluster.living]
    return report


@pytest.fixture(scope="session", autouse=True)
def _end_politely() -> Iterator[None]:
    """Makes SIGTERM end the session as Ctrl-C does, so that clusters end their daemons."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Cluster]:
    """A run that trains without end: a leader and one relay in each of two stages.

    Tests may look at it, ask it for things, and bother it; none may end it. Each module has its
    own, because it takes all the processors that it can get from the modules behind.
    """
    run = make_run(min_nodes_per_stage=1)
    folder = tmp_path_factory.mktemp("training")
    # As an operator starts them: that is looked at, too.
    with cluster.Cluster(folder, run, corpus, fork=False) as living:
        living.start_leader()
        living.start_relays(1)
        living.wait_for_iteration(1)
        yield living
