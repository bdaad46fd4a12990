"""What the tests with real processes share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import cluster
from tests.support.runs import make_run, prepare_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data, the same for all runs."""
    return prepare_corpus(tmp_path_factory.mktemp("data"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Shows beside a failure what the daemons wrote last."""
    report: Any = yield
    if report.failed:
        report.sections += [("daemons", living.tails()) for living in cluster.living]
    return report


@pytest.fixture(scope="session")
def training(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[cluster.Cluster]:
    """A run that trains without end: a leader and one relay in each of two stages.

    Tests may look at it, ask it for things, and bother it; none may end it.
    """
    run = make_run(min_nodes_per_stage=1)
    folder = tmp_path_factory.mktemp("training")
    with cluster.Cluster(folder, run, corpus) as living:
        living.start_leader()
        living.start_relays(1)
        living.wait_for_iteration(1)
        yield living
