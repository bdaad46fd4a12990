"""The number of threads of a compute process changes between its jobs."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from decod.worker import configure
from decod.worker.arena_view import Arena
from decod.worker.job_methods import JobRunner


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_set_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configure, "_USUAL_NUM_THREADS", 2)
    runner = JobRunner(cast("Arena", None))

    def threads(number: object) -> bool:
        message = {"job": 1, "kind": "set_threads", "fields": {"num_threads": number}}
        return bool(runner.run(message)["ok"])

    assert threads(3)
    assert torch.get_num_threads() == 3
    assert threads(None)
    assert torch.get_num_threads() == 2
    for wrong in (0, -1, "4", 1.5, True):
        assert not threads(wrong)
    assert torch.get_num_threads() == 2
