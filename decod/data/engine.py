"""Engines: where the tasks of a preparation run. In this process, in others, or in a Dask cluster.

All have the interface of `concurrent.futures`. Which engine runs a task changes nothing in what the
task writes.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from decod.errors import DataError, HardwareError, NetworkError
from decod.host_limits import num_processors
from decod.installation import install_hint

# With two tasks each, no worker waits while the next task is on its way.
_TASKS_PER_WORKER = 2
_CONNECT_MAX_S = 30
_ADDRESS = re.compile(r"(tcp|tls)://[^/\s]{1,255}:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class Engine:
    """An executor, and how many tasks it does at a time."""

    executor: Executor
    num_workers: Callable[[], int]
    """May change while a cluster grows or shrinks."""
    in_process: bool = False
    """Whether tasks run in this process, one after the other, as soon as they are submitted."""


@dataclass(frozen=True, slots=True)
class EngineTask:
    """A call of a function, with a key by which the caller knows it again."""

    key: tuple[str, int]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A `DataError` on its way back from another process."""

    what: str
    why: str
    fix: str
    code: str


def run_tasks(
    engine: Engine, next_task: Callable[[], EngineTask | None]
) -> Iterator[tuple[tuple[str, int], Any]]:
    """Yield the keys and results of tasks as they end, until there are no more.

    Args:
        engine: Where they run.
        next_task: Returns the next task to start. None: none can start before another has ended.

    Raises:
        DataError: A task raised it.
        HardwareError: A worker died.
        OSError: A task raised it.
    """
    running: dict[Future[Any], tuple[str, int]] = {}
    try:
        while True:
            while len(running) < _TASKS_PER_WORKER * engine.num_workers():
                task = next_task()
                if task is None:
                    break
                future = engine.executor.submit(_attempt, task.function, task.arguments)
                running[future] = task.key
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                result = future.result()
                if isinstance(result, _Refusal):
                    raise DataError(result.what, why=result.why, fix=result.fix, code=result.code)
                yield key, result
    except BrokenProcessPool as error:
        raise HardwareError(
            "a worker process has died",
            why="the system kills processes when memory runs out",
            fix="run the same command again, with a smaller --workers: it goes on where it was",
            code="E-HW-022",
        ) from error
    finally:
        for future in running:
            future.cancel()


def _attempt(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except DataError as error:
        # An error with keywords would not survive the way back.
        return _Refusal(error.what, error.why, error.fix, error.code)


def this_process() -> Engine:
    """Return the engine that needs no other process."""
    return Engine(_Immediate(), lambda: 1, in_process=True)


@contextmanager
def processes(num_workers: int) -> Iterator[Engine]:
    """Lend an engine with that many processes on this host. They end with the context.

    Args:
        num_workers: Number of processes.
    """
    # A tokenizer has threads of its own. More of them than cores would only get in the way.
    num_threads = max(1, num_processors() // num_workers)
    executor = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(num_threads,),
    )
    try:
        yield Engine(executor, lambda: num_workers)
    except BaseException:
        # What has begun is done again by the next command, so nobody need wait for it.
        for process in list((executor._processes or {}).values()):
            process.kill()
        raise
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def dask(address: str) -> Iterator[Engine]:
    """Lend the workers of a Dask cluster as an engine.

    Args:
        address: Address of the cluster's scheduler.

    Raises:
        DataError: Dask is not installed.
        NetworkError: The scheduler doesn't answer.
    """
    try:
        import distributed
    except ImportError as error:
        raise DataError(
            "--dask needs the Python package `distributed`",
            why="it reaches the cluster and is not installed",
            fix=install_hint("dask"),
            code="E-DAT-014",
        ) from error
    client = _connect(distributed, address)
    with client:
        # A task writes a file, so its result must not be taken from an equal one of before.
        executor = client.get_executor(pure=False)
        try:
            yield Engine(executor, lambda: sum(client.nthreads().values()) or 1)
        except distributed.KilledWorker as error:
            raise HardwareError(
                "several Dask workers died at the same task",
                why=" ".join(str(error).split())[:200],
                fix="give the workers more memory, and run the same command again: it goes on "
                "where it was",
                code="E-HW-022",
            ) from error
        except CancelledError as error:
            raise NetworkError(
                f"the Dask scheduler at {address} has gone",
                why="its tasks were cancelled",
                fix="start it, and run the same command again: it goes on where it was",
                code="E-NET-040",
            ) from error


def _connect(distributed: Any, address: str) -> Any:
    """Return a client of a scheduler."""
    # Dask takes many strings for an order to start a cluster of its own.
    if not _ADDRESS.fullmatch(address):
        raise _no_scheduler(address, "that is no address such as tcp://10.0.0.1:8786")
    try:
        return distributed.Client(address, timeout=_CONNECT_MAX_S, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200] or "it does not answer"
        raise _no_scheduler(address, reason) from error


def _no_scheduler(address: str, reason: str) -> NetworkError:
    return NetworkError(
        f"there is no Dask scheduler at {address}",
        why=reason,
        fix="start one with `dask scheduler`, and give the address that it prints",
        code="E-NET-040",
    )


class _Immediate(Executor):
    """Runs tasks when they are submitted."""

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        future.set_result(fn(*args, **kwargs))
        return future


def _begin_worker(num_threads: int) -> None:
    """Make this process a worker of the process that started it."""
    # The tokenizer's threads are made at first use, in a language that doesn't see `os.environ`.
    for name in ("RAYON_NUM_THREADS", "FASTOKENS_BPE_THREADS"):
        os.putenv(name, str(num_threads))
    # Ctrl-C goes to all processes, and the first of them ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
