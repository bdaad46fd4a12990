"""The planning process: what it answers, and what a node loses when it dies."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from decod.driver.compute import ComputeDiedError, PlanningProcess
from decod.ids import NodeId
from decod.planner.deciding import Unsettled, decide
from decod.protocol.core import jobs
from decod.run.protocol_config import ProtocolConfig
from tests.waiting import wait_until

D, R, T = NodeId("d"), NodeId("r"), NodeId("t")
UNSETTLED = Unsettled(
    paths=((D, R, T),),
    capacities=((D, 2),),
    outward=((D, ((R, 1.5),)), (R, ((T, 0.1),)), (T, ((D, 1e-3),))),
    inward=((R, ((D, 7.0),)),),
    compute_s=((D, 0.1), (R, 0.2), (T, 0.3)),
    rooms=(((R, 1),), ((T, 1),)),
    fair=True,
    work_max=1000,
)
JOB = jobs.DecideFlows(UNSETTLED)

HANGS = "import signal; signal.pause()"
IGNORES_ITS_JOBS = "import sys; sys.exit(3)"


@pytest.fixture(name="code")
def _code() -> str | None:
    return None


@pytest.fixture(name="planning")
@asynccontextmanager
async def _planning(code: str | None) -> AsyncIterator[PlanningProcess]:
    """The real process, or one that runs `code`."""
    planning = PlanningProcess(ProtocolConfig())
    if code:
        command = (sys.executable, "-I", "-S", "-c", code)
        planning = PlanningProcess(ProtocolConfig(), command=command)
    yield planning
    await planning.close()


async def test_the_process_decides_as_this_one_would(planning: PlanningProcess) -> None:
    assert planning.pid is None, "nobody needs it yet"
    replies = [planning.submit(JOB) for _ in range(2)]
    pids = set()
    for reply in replies:
        assert (await reply).result == jobs.FlowsDecided(decide(UNSETTLED))
        pids.add(planning.pid)
    assert len(pids) == 1, "jobs that come while it starts start no second one"


async def test_a_process_that_was_killed_loses_its_jobs_and_another_takes_the_next(
    planning: PlanningProcess,
) -> None:
    await planning.submit(JOB)
    first = planning.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    lost = planning.submit(JOB)
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(ComputeDiedError, match="planning process ended"):
        await lost
    reply = await planning.submit(JOB)
    assert reply.result == jobs.FlowsDecided(decide(UNSETTLED))
    assert planning.pid != first


@pytest.mark.parametrize("code", [IGNORES_ITS_JOBS])
async def test_a_process_that_ends_at_once_fails_the_job(planning: PlanningProcess) -> None:
    for _ in range(2):
        with pytest.raises(ComputeDiedError, match="exit code 3"):
            await planning.submit(JOB)


async def test_a_process_that_cannot_be_started_fails_the_job(tmp_path: Path) -> None:
    planning = PlanningProcess(ProtocolConfig(), command=(str(tmp_path / "nothing"),))
    with pytest.raises(ComputeDiedError, match="can't start"):
        await planning.submit(JOB)
    await planning.close()


@pytest.mark.parametrize("code", [HANGS])
async def test_a_node_that_ends_does_not_wait_for_a_decision(planning: PlanningProcess) -> None:
    job = planning.submit(JOB)
    await wait_until(lambda: planning.pid is not None)
    pid = planning.pid
    assert pid is not None
    await planning.close()
    assert job.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
