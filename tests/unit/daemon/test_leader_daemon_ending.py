"""How a leader ends: what can't be kept is said, and how to go on from what is."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decod.daemon import leader_daemon as module
from decod.daemon.leader_daemon import _Leading
from decod.daemon.node_errors import no_member
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.run_snapshot import SnapshotSources
from decod.errors import DecodError, HardwareError
from decod.net.join_string import JoinString
from decod.protocol.core.effects import Stop, StopReason
from decod.protocol.core.events import AverageRequested, BlockCommits, DrainRequested
from decod.protocol.leadership.leader import LeaderState
from tests.support.noted import noted
from tests.unit.daemon.nodes import STRANGER, give_driver, make_node
from tests.unit.daemon.test_leader_daemon import options
from tests.unit.protocol.cast import view_of

NO_ROOM = HardwareError("the disk is full", why="nothing fits", fix="make room")
NOT_KEPT = "the model of iteration 9 is not kept: stage 1 has no member"


class Ending:
    """A leader after iteration 9, which the test's operator ends."""

    def __init__(self, folder: Path, node: PipelineNode) -> None:
        self._said: list[str] = []
        self.posted: list[type] = []
        self._averages = False
        self.reason = StopReason.FINISHED
        self.hint = (
            f"go on from iteration 5 with: decod leader run.toml --state-dir {folder} --resume 5"
        )
        node.say = self._said.append
        self.node = node
        self.stopped: asyncio.Future[Stop] = asyncio.get_running_loop().create_future()
        self.facts = SimpleNamespace(leading=None, view=view_of("d0"), electing=False)
        driver = SimpleNamespace(
            stopped=self.stopped, facts=self.facts, post=self._post, broken=False
        )
        give_driver(node, driver)
        self.leading = _Leading(node, options(folder))
        fields = {"iteration": "9.1", "loss": 2.0, "num_tokens": 8}
        node.progress.take(noted("step.committed", fields, 1.0))
        self._said.clear()

    @property
    def lines(self) -> list[str]:
        """What it has said, but for what leaving means."""
        return [line for line in self._said if not self.warns(line)]

    @staticmethod
    def warns(line: str) -> bool:
        return line.startswith("me is the run's only data node: the run ends for everybody")

    @property
    def warned(self) -> bool:
        """Whether it has said first that the run ends."""
        return any(map(self.warns, self._said[:1]))

    def writes(self, problem: str | None = None) -> None:
        """Have its last checkpoint written, or not."""

        async def finish(**_: Any) -> None:
            self.leading._checkpoints.problem = problem

        self.leading._checkpoints.finish = finish  # type: ignore[method-assign]

    def cut_off(self) -> None:
        """Have it lead two others whom it can't reach."""
        self.facts.view = view_of("d0", "d1", "r1a")
        self._lead(lacking=("d1", "r1a"))

    def learn_apart(self, *, averages: bool) -> None:
        """Have its members step by themselves, and average when they are asked to, or never."""
        self._lead(learns_apart=True)
        self._averages = averages

    def _lead(self, *, lacking: tuple[str, ...] = (), learns_apart: bool = False) -> None:
        self.facts.leading = SimpleNamespace(
            lacking=lacking,
            anchor=self.node.progress.iteration,
            can_hand_over=False,
            learns_apart=learns_apart,
            state=LeaderState.TRAINING,
            view=SimpleNamespace(members=(), cut=()),
        )

    def _post(self, event: object) -> None:
        self.posted.append(type(event))
        if isinstance(event, AverageRequested) and self._averages:
            self.node.requests.take(noted("learning.shared", {}))
        if isinstance(event, DrainRequested):
            self.stopped.set_result(Stop(self.reason, "the run has ended"))

    async def end(self, *, complete: bool = False, timeout_s: float | None = None) -> Stop:
        if complete:
            self.node.completed.set()
        else:
            self.node.requests.leave(timeout_s)
        return await self.leading.run()

    def events(self) -> list[str]:
        return [each["event"] for each in self.node.recent.describe(0.0, name="")]


@pytest.fixture(name="error")
def _error() -> None:
    "Nothing goes wrong when the model is exported, unless a test says so."


@pytest.fixture(name="ending")
@asynccontextmanager
async def _ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DecodError | None
) -> AsyncIterator[Ending]:
    async def export(sources: SnapshotSources, *_: object) -> int:
        if error is not None:
            raise error
        return sources.progress.iteration

    monkeypatch.setattr(module, "export_model", export)
    with make_node(tmp_path) as node:
        node.progress.iteration = 1
        yield Ending(tmp_path, node)


@pytest.mark.parametrize("error", [no_member(1)])
async def test_a_run_that_ends_without_a_stage_says_what_is_lost_and_how_to_go_on(
    ending: Ending,
) -> None:
    ending.leading._checkpoints.last = 5
    assert (await ending.end()).reason is StopReason.FINISHED
    assert ending.lines == [NOT_KEPT, ending.hint]
    assert ending.warned
    assert ending.leading.unkept == NOT_KEPT
    assert ending.events() == [], "no checkpoint is tried that must fail"


@pytest.mark.parametrize("error", [no_member(1)])
async def test_the_line_that_says_how_to_go_on_has_the_options_of_the_leader(
    tmp_path: Path, ending: Ending
) -> None:
    ending.leading._options = options(
        tmp_path,
        data="/corpus",
        export_dir=Path("/a model"),
        join_path=Path("/join.txt"),
    )
    ending.leading._checkpoints.last = 5
    await ending.end()
    chosen = "--data /corpus --export '/a model' --write-join /join.txt --resume 5"
    assert ending.lines[-1] == ending.hint.replace("--resume 5", chosen)


async def test_a_run_whose_last_checkpoint_could_not_be_written_says_so(ending: Ending) -> None:
    """Its model is kept, and what a resumed run would repeat is not told by that."""
    ending.leading._checkpoints.last = 5
    ending.writes("E-CKP-012 no room")
    assert (await ending.end()).reason is StopReason.FINISHED
    model, unkept, hint = ending.lines
    assert model.startswith("model of iteration 9: ")
    assert unkept == "the checkpoint of iteration 9 is not kept: E-CKP-012 no room"
    assert hint == ending.hint
    assert ending.leading.unkept == unkept, "`decod drain` says it, too"


@pytest.mark.parametrize("error", [no_member(1)])
async def test_a_leader_without_a_quorum_says_that_others_may_go_on(ending: Ending) -> None:
    """A checkpoint that is resumed would be a second run."""
    ending.leading._checkpoints.last = 5
    ending.cut_off()
    await ending.end()
    elsewhere, *rest = ending.lines
    assert "they may go on with another leader; to take part: decod leader" in elsewhere
    named = JoinString.parse(elsewhere.rpartition("--join ")[2]).addresses
    assert named == tuple(member.address for member in view_of("d0", "d1").data_nodes)
    assert rest == [NOT_KEPT, ending.hint]
    assert not ending.warned


@pytest.mark.parametrize(("averages", "timeout_s"), [(True, None), (False, 0.0)])
async def test_what_members_have_learnt_by_themselves_is_averaged_before_a_run_ends(
    ending: Ending, *, averages: bool, timeout_s: float | None
) -> None:
    """But the operator does not wait longer than leaving may take."""
    ending.learn_apart(averages=averages)
    await ending.end(timeout_s=timeout_s)
    asked = [kind for kind in ending.posted if kind in (AverageRequested, BlockCommits)]
    assert asked[:2] == [AverageRequested, BlockCommits]


async def test_a_run_that_is_done_needs_no_further_average(ending: Ending) -> None:
    ending.learn_apart(averages=False)
    await ending.end(complete=True)
    assert AverageRequested not in ending.posted


@pytest.mark.parametrize("error", [None, no_member(1)])
async def test_who_was_replaced_has_nothing_to_resume(ending: Ending) -> None:
    ending.leading._checkpoints.last = 5
    ending.reason = StopReason.SUPERSEDED
    assert (await ending.end()).reason is StopReason.SUPERSEDED
    assert not any("--resume" in line for line in ending.lines), ending.lines


@pytest.mark.parametrize("error", [no_member(1)])
async def test_a_run_of_which_nothing_is_kept_does_not_end_well(ending: Ending) -> None:
    with pytest.raises(DecodError, match=r"E-RUN-009 .*checkpoint\.every_iterations") as caught:
        await ending.end()
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith(f"E-RUN-009 {NOT_KEPT}")
    assert ending.stopped.done(), "the others are let go"
    assert ending.lines == []


@pytest.mark.parametrize("error", [no_member(1)])
async def test_a_run_that_is_done_and_can_not_be_kept_does_not_end_well(ending: Ending) -> None:
    """Nobody asked for its end, so nobody may look at what it says."""
    ending.leading._checkpoints.last = 5
    with pytest.raises(DecodError, match=r"E-RUN-009 .*--resume 5"):
        await ending.end(complete=True)
    assert ending.lines == [ending.hint]


async def test_a_model_that_was_kept_before_its_stage_left_is_enough(
    monkeypatch: pytest.MonkeyPatch, ending: Ending
) -> None:
    ending.writes()
    ending.node.progress.take(noted("stage.ending", {"stage": 1, "peer": STRANGER}, 2.0))
    assert ending.leading._checkpoint_task is not None
    await ending.leading._checkpoint_task
    monkeypatch.setattr(module, "export_model", None)
    assert (await ending.end()).reason is StopReason.FINISHED
    model, following = ending.lines
    assert model.startswith("model of iteration 9: ")
    folder = model.removeprefix("model of iteration 9: ")
    assert following == f'next: decod generate --model {folder} "Once upon a time"'
    assert ending.leading.unkept == ""


async def test_a_model_of_what_the_run_gave_up_is_not_taken_for_the_last(ending: Ending) -> None:
    ending.writes()
    await ending.leading._keep_result()
    returned = {"iteration": 9, "source": "neighbours", "num_repeated": 0, "reason": "lost"}
    ending.node.progress.take(noted("run.returned", returned, 2.0))
    await ending.end()
    assert sum(line.startswith("model of iteration 9: ") for line in ending.lines) == 2


@pytest.mark.parametrize("error", [NO_ROOM])
async def test_a_disk_that_is_full_is_an_error_and_the_last_checkpoint_is_named(
    ending: Ending,
) -> None:
    ending.leading._checkpoints.last = 5
    with pytest.raises(HardwareError, match="the disk is full"):
        await ending.end()
    assert ending.lines == [ending.hint]
