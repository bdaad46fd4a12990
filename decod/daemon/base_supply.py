"""The weights that a run with an adapter does not train, on their way to this host and from it.

A node builds its stage once it has these weights: from the folder of `--base`, from its cache, or
from the Hugging Face Hub or members. Jobs that come meanwhile wait. The core takes no part in this,
because a candidate may take as long as it needs to build its stage
(`decod.protocol.leadership.joining`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, Self

from decod.daemon.waits import OpenWaits
from decod.driver.arena import TensorRegion
from decod.driver.compute import Compute, Reply
from decod.driver.driver import CoreHandle
from decod.errors import DecodError
from decod.ids import NodeId
from decod.net.donor import StateBlob
from decod.protocol.core.jobs import BaseJob, Build
from decod.protocol.core.view import Role
from decod.run.run_config import RunConfig
from decod.tasks import Backoff, TaskSet, in_thread
from decod.train.checkpoint.base import ArrivingPart, BaseSource, base_part_bytes, parts_of
from decod.train.checkpoint.initial_state import InitialState


class FetchPart(Protocol):
    """Fetches a part from one of some nodes. See `Gateway.fetch_base`."""

    async def __call__(self, sha256: str, donors: Sequence[NodeId], sink: ArrivingPart) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job that has not been passed on."""

    job: BaseJob
    submit: Callable[[], asyncio.Future[Reply]]
    answer: asyncio.Future[Reply]


class BaseSupply:
    """A layer between the driver and the compute process. Use it in `async with`.

    Args:
        source: Where parts are on this host.
        run: The run.
        core: The node's core, which knows the members.
        fetch: Fetches a part.
        note: Takes the name of an event, and its fields as keywords.
        waits: Takes what is waited for.
        leave: Has the node leave at once.

    Raises:
        DecodError: On leaving `async with`: the node left the run because its folder holds other
            weights.
    """

    def __init__(  # noqa: PLR0913 - what it needs of a node.
        self,
        source: BaseSource,
        run: RunConfig,
        core: CoreHandle,
        *,
        fetch: FetchPart,
        note: Callable[..., None],
        waits: OpenWaits,
        leave: Callable[[], None],
    ) -> None:
        self._source = source
        self._run = run
        self._core = core
        self._fetch = fetch
        self._note = note
        self._waits = waits
        self._leave = leave
        self._tasks = TaskSet()
        self._compute: Compute | None = None
        self._waiting = deque[_Waiting]()
        """A stage whose weights are fetched, and the jobs behind it, in order."""
        self._found: dict[int, asyncio.Future[InitialState | None]] = {}
        """Parts by their number, as far as anybody has asked for them."""
        self._fault: DecodError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, _trace: object) -> None:
        await self._tasks.close()
        if self._fault is not None:
            raise self._fault from error

    # --- as the driver sees it ----------------------------------------------------------------

    def before(self, compute: Compute) -> Compute:
        """Return this object as a `Compute` that passes jobs on to `compute`."""
        self._compute = compute
        return self

    @property
    def ended(self) -> asyncio.Future[str]:
        assert self._compute is not None
        return self._compute.ended

    def submit(
        self,
        job: BaseJob,
        *,
        inputs: tuple[TensorRegion, ...] = (),
        outputs: tuple[TensorRegion, ...] = (),
    ) -> asyncio.Future[Reply]:
        """Queue a job. A stage is built once its weights are here."""
        compute = self._compute
        assert compute is not None
        submit = partial(compute.submit, job, inputs=inputs, outputs=outputs)
        if not self._waiting and not isinstance(job, Build):
            return submit()
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(job, submit, answer))
        if len(self._waiting) == 1:
            self._tasks.start(self._pass_on())
        return answer

    async def _pass_on(self) -> None:
        """Pass on what waits, in order."""
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first.job, Build):
                await self._fetch_stage(first.job.stage_index, first.job.cut)
            self._waiting.popleft()
            first.submit().add_done_callback(partial(_hand_on, first.answer))

    # --- from others --------------------------------------------------------------------------

    async def _fetch_stage(self, stage_index: int, blocks: Sequence[int]) -> None:
        """Wait until all parts of a stage are on this host."""
        parts = parts_of(self._run, stage_index, blocks)
        missing = [part for part in parts if not await self._has(part)]
        if not missing:
            return
        self._note("base.fetching", num_parts=len(missing), stage=stage_index)
        begun_s = asyncio.get_running_loop().time()
        sizes = [base_part_bytes(self._run.model, part) for part in missing]
        what = f"the base's weights for stage {stage_index}"
        async with self._waits.of(what, sum(sizes)) as arrived:
            for part, num_bytes in zip(missing, sizes, strict=True):
                await self._fetch_part(part)
                arrived(num_bytes)
        duration_s = round(asyncio.get_running_loop().time() - begun_s, 1)
        self._note("base.fetched", num_parts=len(missing), duration_s=duration_s)

    async def _has(self, part: int) -> bool:
        try:
            return await self._find(part) is not None
        except DecodError as error:
            if self._fault is None:
                self._fault = error
                self._leave()
            # Nothing is built any more: the node leaves.
            await asyncio.Event().wait()
            raise

    async def _fetch_part(self, part: int) -> None:
        pauses = Backoff()
        told = False
        while True:
            arriving = self._source.arriving(self._run.model, part)
            try:
                await self._fetch(self._source.hashes[part], self._donors(part), arriving)
                await in_thread(arriving.keep)
            except DecodError as error:
                if not told:
                    self._note("base.failed", part=part, reason=str(error))
                told = True
            else:
                self._found.pop(part, None)
                return
            finally:
                await in_thread(arriving.close)
            await asyncio.sleep(pauses.next_s())

    def _donors(self, part: int) -> list[NodeId]:
        """Return who may have a part: members whose stage holds it, then data nodes.

        A candidate knows of members only what the leader has told it.
        """
        facts = self._core.driver.facts
        view = facts.view
        stages = range(view.num_stages)
        blocks = view.cut
        holding = [stage for stage in stages if part in parts_of(self._run, stage, blocks)]
        here = [member for member in view.members if member.stage_index in holding]
        data = [member for member in view.members if member.role is Role.DATA]
        ordered = [member.node_id for member in (*facts.donors, *here, *data)] + [view.leader]
        return [node for node in dict.fromkeys(ordered) if node != facts.node_id]

    # --- for others ---------------------------------------------------------------------------

    async def find(self, sha256: str) -> StateBlob | str:
        """Return a part for another node, or the reason why there is none."""
        if sha256 not in self._source.hashes:
            return "the run has no such weights"
        try:
            found = await self._find(self._source.hashes.index(sha256))
        except DecodError as error:
            return error.what
        if found is None:
            return "this node does not have these weights"

        async def read(offset: int, num_bytes: int) -> bytes:  # noqa: ARG001 - a chunk's own.
            return await in_thread(lambda: found.read(offset))

        return StateBlob(manifest=found.description.text, read=read, release=_nothing)

    async def _find(self, part: int) -> InitialState | None:
        """Return a part. Reading it takes long, so all who ask share one result."""
        if part not in self._found:
            self._found[part] = in_thread(lambda: self._source.find(self._run.model, part))
        asked = self._found[part]
        try:
            found = await asyncio.shield(asked)
        except DecodError:
            self._found.pop(part, None)
            raise
        if found is None:
            self._found.pop(part, None)
        return found


def _hand_on(answer: asyncio.Future[Reply], done: asyncio.Future[Reply]) -> None:
    """Answer as a compute process has."""
    if answer.done():
        return
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())


def _nothing() -> None:
    """Do nothing: files are opened anew by each reader, and need no release."""
