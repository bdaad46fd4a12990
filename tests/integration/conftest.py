"""What the tests with real processes share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import cluster
from tests.support.runs import prepare_corpus


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
