"""How the leader decides what a lost stage is rebuilt from, and who takes it over."""

from dataclasses import dataclass, field, replace

import pytest

from decod.ids import Iteration, NodeId
from decod.protocol.core.effects import Effect, ReadCheckpoint
from decod.protocol.core.era import Kept, Mark, Source, add_mark
from decod.protocol.core.events import CheckpointRead
from decod.protocol.core.messages import Join, NodeLoad, Prepared
from decod.protocol.core.view import Member, Opening, Role, View
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.leader import Leader
from decod.protocol.leadership.stage_recovery import EraPlan, StageRecovery
from decod.run.model_config import StagesConfig
from tests.unit.protocol.cast import (
    D0,
    FACTS,
    MANIFEST,
    R1A,
    R2A,
    R2B,
    RUN,
    configured,
    member,
    view_of,
)

CONFIG = configured(snapshot_every_iterations=10)
STAGED = replace(RUN, stages=StagesConfig(num_relay_stages=3), protocol=CONFIG)
R3A, R3B, R3C = NodeId("r3a"), NodeId("r3b"), NodeId("r3c")
ALL = ("d0", "r2a", "r2b", "r3a", "r3b", "r3c")
"""Nobody is left of stage 1."""


def hash_of(stage: int, iteration: int) -> str:
    return f"{stage}@{iteration}"


def mark(iteration: int) -> Mark:
    return Mark(iteration, tuple((stage, hash_of(stage, iteration)) for stage in range(4)))


def kept(stage: int, iteration: int) -> Kept:
    return Kept(stage, iteration, hash_of(stage, iteration))


@dataclass
class Run:
    """A leader's record after iteration 25, with marks at 10 and 20."""

    names: tuple[str | Member, ...] = ALL
    iteration: int = 25
    on_disk: dict[str, list[Kept]] = field(default_factory=dict)
    leaving: dict[NodeId, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recovery = StageRecovery(STAGED, 0)
        self.admission = Admission(STAGED, FACTS)
        self.recovery.marks = (mark(10), mark(20))
        # What stages that live have kept of themselves.
        for name in ALL:
            stage = 0 if name == "d0" else int(name[1])
            self.on_disk.setdefault(name, []).extend((kept(stage, 10), kept(stage, 20)))

    @property
    def view(self) -> View:
        return view_of(*self.names, num_stages=4)

    def join(self, name: str, *, stage: int, states: tuple[Kept, ...] = ()) -> None:
        node = NodeId(name)
        join = Join(f"{name}:1", Role.RELAY, 2, stage, MANIFEST, 1, name=name, kept=states)
        self.admission.join(self.view, node, join)
        self.admission.prepared(self.view, node, Prepared(stage, "h"))

    def decide_without(self) -> tuple[EraPlan | None, list[Effect]]:
        """What is decided on what is known by now."""
        return self.recovery.decide(self.view, self.iteration, self.admission, self.leaving)

    def decide(self) -> EraPlan | None:
        self.recovery.opened(100.0, self.view, self.iteration)
        assert self.recovery.decide(self.view, self.iteration, self.admission, self.leaving) == (
            None,
            [],
        ), "ask first"
        self.recovery.told(
            tuple(
                NodeLoad(node, 0, 2, 0, "training", tuple(self.on_disk.get(node, ())))
                for node in self.view.by_id
            )
        )
        return self.recovery.decide(self.view, self.iteration, self.admission, self.leaving)[0]


def plan_of(run: Run) -> EraPlan:
    plan = run.decide()
    assert plan is not None
    return plan


def plan_after_reading(run: Run, *, newest: int | None) -> EraPlan:
    """The leader's checkpoint is read before anybody goes back to it; `newest` is whole."""
    asked = run.recovery.checkpoint
    assert asked is not None
    assert run.decide() is None
    assert f"reading the checkpoint of iteration {asked}" in run.recovery.describe()
    run.recovery.read(CheckpointRead(asked, newest))
    plan, effects = run.recovery.decide(run.view, run.iteration, run.admission, run.leaving)
    assert plan is not None
    assert effects == []
    return plan


def takers(plan: EraPlan, stage: int = 1) -> set[NodeId]:
    return {m.node_id for m in plan.members if m.stage_index == stage}


def test_all_go_back_to_the_newest_iteration_that_every_stage_has_a_state_of() -> None:
    plan = plan_of(Run(on_disk={"r3b": [kept(1, 20)], "r2a": [kept(1, 10)]}))
    assert (plan.iteration, plan.origin.source) == (20, Source.KEPT)
    assert plan.origin.lost == (1,)
    assert plan.origin.num_repeated == 5
    assert plan.origin.holders_of(1) == (R3B,)
    assert plan.origin.holders_of(2) == (R2A, R2B)


def test_an_older_mark_serves_where_the_newest_is_not_complete() -> None:
    plan = plan_of(Run(on_disk={"r2a": [kept(1, 10)]}))
    assert (plan.iteration, plan.origin.num_repeated) == (10, 15)


def test_a_state_that_is_not_what_was_committed_does_not_count() -> None:
    """It is of a future that was given up: its iteration was computed again, maybe otherwise."""
    other = Kept(1, 20, "another hash")
    plan = plan_of(Run(on_disk={"r3b": [other], "r2a": [kept(1, 10)]}))
    assert plan.iteration == 10


def test_who_holds_the_state_takes_the_stage_over_else_one_of_the_largest() -> None:
    assert takers(plan_of(Run(on_disk={"r2b": [kept(1, 20)]}))) == {R2B}
    assert takers(plan_of(Run(on_disk={"d0": [kept(1, 20)]}))) == {R3A}


def test_no_stage_gives_its_last_worker_and_who_leaves_goes_nowhere() -> None:
    run = Run(("d0", "r2a", "r3a", "r3b"), on_disk={"r2a": [kept(1, 20)]})
    assert takers(plan_of(run)) == {R3A}
    run = Run(("d0", "r2a", "r3a", "r3b"), on_disk={"r2a": [kept(1, 20)]}, leaving={R3A: "x"})
    assert run.decide() is None
    assert run.recovery.waiting
    assert not run.recovery.hopeless
    assert "waits for a host" in run.recovery.describe()


def test_two_lost_stages_are_taken_over_by_two_relays() -> None:
    run = Run(("d0", "r3a", "r3b", "r3c"), on_disk={"d0": [kept(1, 20), kept(2, 20)]})
    plan = plan_of(run)
    assert plan.origin.lost == (1, 2)
    assert [len(takers(plan, stage)) for stage in (1, 2, 3)] == [1, 1, 1]


def test_a_candidate_that_stands_ready_enters_and_nobody_moves() -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    run.join("r1a", stage=1)
    plan = plan_of(run)
    assert takers(plan) == {R1A}
    assert {m.node_id: m.since_iteration for m in plan.members}[R1A] == 20


def test_a_host_that_comes_back_brings_its_state() -> None:
    run = Run()
    run.join("r1a", stage=1, states=(kept(1, 20),))
    plan = plan_of(run)
    assert (plan.iteration, plan.origin.holders_of(1)) == (20, (R1A,))


def test_nobody_is_newer_than_the_state_that_all_go_back_to() -> None:
    late = replace(member("r2b"), since_iteration=24)
    run = Run(("d0", "r2a", late, "r3a", "r3b"), on_disk={"d0": [kept(1, 20)]})
    assert max(m.since_iteration for m in plan_of(run).members) == 20


def test_members_hold_the_last_iteration_themselves() -> None:
    """The stage is lost right after a mark, before anybody but the mirror has written it."""
    run = Run(on_disk={"d0": [kept(1, 20)]}, iteration=20)
    for name in ALL:
        run.on_disk[name] = [k for k in run.on_disk[name] if k.stage_index == 1]
    plan = plan_of(run)
    assert (plan.iteration, plan.origin.num_repeated) == (20, 0)
    assert plan.origin.holders_of(2) == (R2A, R2B)


@pytest.mark.parametrize(("checkpoint", "expected"), [(15, 20), (22, 22), (99, 20)])
def test_a_checkpoint_serves_if_it_is_newer(checkpoint: int, expected: int) -> None:
    """One from beyond what is committed is of a future that was given up."""
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    run.recovery.checkpoint = checkpoint
    plan = plan_of(run) if expected != checkpoint else plan_after_reading(run, newest=checkpoint)
    assert plan.iteration == expected
    checkpointed = plan.origin.source is Source.CHECKPOINT
    assert checkpointed == (expected == checkpoint)
    assert not checkpointed or plan.origin.holders_of(1) == (D0,)


@pytest.mark.parametrize(
    ("newest", "expected", "source"),
    [(None, 20, Source.KEPT), (15, 20, Source.KEPT), (21, 21, Source.CHECKPOINT)],
)
def test_a_checkpoint_that_was_altered_is_not_gone_back_to(
    newest: int | None, expected: int, source: Source
) -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    run.recovery.checkpoint = 22
    plan = plan_after_reading(run, newest=newest)
    assert (plan.iteration, plan.origin.source) == (expected, source)


def test_with_an_altered_checkpoint_and_nothing_kept_nobody_goes_back() -> None:
    run = Run()
    run.recovery.checkpoint = 22
    assert plan_after_reading(run, newest=None).origin.source is Source.NEIGHBOURS


def test_a_checkpoint_is_read_once_and_only_when_somebody_can_take_over() -> None:
    run = Run(("d0", "r2a", "r3a"))
    run.recovery.checkpoint = 22
    assert run.decide() is None
    assert run.recovery.waiting
    run.join("r1a", stage=1)
    for expected in ([ReadCheckpoint(22)], []):
        assert run.recovery.decide(run.view, run.iteration, run.admission, run.leaving) == (
            None,
            expected,
        )
    run.recovery.read(CheckpointRead(9, None))
    assert run.recovery.checkpoint == 22, "an answer to another question"
    run.recovery.read(CheckpointRead(22, 22))
    plan, _ = run.recovery.decide(run.view, run.iteration, run.admission, run.leaving)
    assert plan is not None
    assert plan.iteration == 22


def test_what_the_run_started_from_serves_for_a_while() -> None:
    run = Run(iteration=20)
    run.recovery.marks = ()
    plan = plan_of(run)
    assert (plan.iteration, plan.origin.source) == (0, Source.START)


def test_without_any_state_the_neighbours_weights_are_mixed_and_nobody_goes_back() -> None:
    plan = plan_of(Run())
    assert (plan.iteration, plan.origin.source) == (25, Source.NEIGHBOURS)
    assert plan.origin.num_repeated == 0


def test_what_is_not_whole_is_told_to_everybody() -> None:
    plan = plan_of(Run(on_disk={"r2a": [kept(1, 10)]}))
    missing = "no whole state of stage 1 after iteration 20 is left"
    assert plan.reason == f"stage 1 was lost; {missing}"
    assert plan_of(Run(on_disk={"r3b": [kept(1, 20)]})).reason == "stage 1 was lost"


# --- an era that somebody can't begin ---------------------------------------------------------


@dataclass
class Begun:
    """A run that has gone back to 20, where relay r3a took stage 1 over."""

    run: Run = field(
        default_factory=lambda: Run(on_disk={"d0": [kept(1, 20), kept(1, 10)], "r2a": []})
    )

    def __post_init__(self) -> None:
        self.run.recovery.has_start = False
        self.plan = plan_of(self.run)
        self.run.iteration = 20
        self.take_places()

    def take_places(self) -> None:
        self.run.names = self.plan.members
        self.run.recovery.opened(101.0, self.run.view, self.run.iteration)

    def again(self, *stuck: NodeId, loading: tuple[NodeId, ...] = ()) -> EraPlan | None:
        """Some tell that they can't get their state; return what is planned."""
        rebuild = self.run.recovery
        for node in stuck:
            assert rebuild.refuse(node, D0)
            assert not rebuild.refuse(node, D0), "it has told that"
        assert rebuild.needed
        assert self.run.decide_without() == (None, [])
        states = dict.fromkeys((*stuck, *loading), "syncing")
        loads = [
            NodeLoad(n, 0, 2, 0, states.get(n, "training"), tuple(self.run.on_disk.get(n, ())))
            for n in self.run.view.by_id
        ]
        rebuild.told(tuple(loads))
        plan = self.run.decide_without()[0]
        if plan is not None:
            self.plan, self.run.iteration = plan, plan.iteration
            self.take_places()
        return plan

    def lose(self, iteration: int, *stages: int) -> None:
        """The states of an iteration turn out to be bad on all disks."""
        for states in self.run.on_disk.values():
            gone = [k for k in states if k.iteration == iteration and k.stage_index in stages]
            for state in gone:
                states.remove(state)


def test_where_the_copies_turn_out_to_be_bad_the_next_best_serves() -> None:
    begun = Begun()
    begun.lose(20, 1)
    plan = begun.again(R3A)
    assert plan is not None
    assert (plan.iteration, plan.origin.source) == (10, Source.KEPT)
    assert plan.origin.lost == (1,)
    assert plan.origin.num_repeated == 15, "and what the first way back had cost"
    assert plan.members == begun.run.names, "nobody moves"
    assert "no whole state of stage 1 after iteration 20 is left" in plan.reason
    assert not begun.run.recovery.needed


def test_whoever_is_there_already_gives_it_to_the_others() -> None:
    """A disk was bad, but somebody of the stage had read it."""
    begun = Begun()
    begun.lose(20, 2)
    plan = begun.again(R2B)
    assert plan is not None
    assert (plan.iteration, plan.origin.holders_of(2)) == (20, (R2A,))


def test_the_leader_stays_and_tries_nothing_a_third_time() -> None:
    begun = Begun()
    for expected in (20, 10, 10):
        plan = begun.again(D0)
        assert plan is not None
        assert plan.iteration == expected
    assert begun.again(D0) is None
    assert begun.run.recovery.hopeless


def test_neighbours_stand_in_once_it_is_clear_who_holds_something() -> None:
    """Those who are on their way back have given up what they held."""
    begun = Begun()
    begun.lose(20, 1, 2)
    begun.lose(10, 1, 2)
    assert begun.again(R3A, loading=(R2A, R2B)) is None
    assert not begun.run.recovery.hopeless
    plan = begun.again(loading=(R3A, R2A))
    assert plan is not None
    assert (plan.iteration, plan.origin.source, plan.origin.lost) == (20, Source.NEIGHBOURS, (1,))


def test_with_a_stage_of_which_nobody_can_go_back_that_is_mixed_too() -> None:
    begun = Begun()
    begun.lose(20, 1, 2)
    begun.lose(10, 1, 2)
    plan = begun.again(R3A, R2A, R2B)
    assert plan is not None
    assert (plan.origin.source, plan.origin.lost) == (Source.NEIGHBOURS, (1, 2))


def test_without_neighbours_there_is_no_way_on() -> None:
    run = Run(("d0",))
    assert run.decide() is None
    assert run.recovery.hopeless


def test_the_cost_is_told_with_the_first_commit_of_the_era() -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    plan_of(run)
    assert [mark.iteration for mark in run.recovery.marks] == [10, 20]
    (note,) = run.recovery.committed(107.5, 21, (), before=20)
    assert dict(note.fields) == {
        "stage": "1",
        "source": "kept",
        "num_repeated": 5,
        "duration_s": 7.5,
    }
    assert run.recovery.committed(109.0, 22, (), before=21) == []


def test_a_second_loss_before_anything_was_committed_adds_to_the_cost() -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)], "d0": [kept(1, 10)]})
    assert plan_of(run).origin.num_repeated == 5
    run.names, run.iteration = ("d0", "r2a", "r2b", "r3a"), 20
    run.recovery.opened(105.0, run.view, 20)
    assert plan_of(run).origin.num_repeated == 15
    (note,) = run.recovery.committed(110.0, 11, (), before=10)
    assert dict(note.fields)["duration_s"] == 10.0


def test_an_elected_leader_goes_on_with_the_era() -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    origin = plan_of(run).origin
    opening = Opening(
        Iteration(21, 1, 1),
        Iteration(20, 0, 1),
        run.view,
        marks=(mark(10), mark(20)),
        origin=origin,
    )
    other = StageRecovery(STAGED, 0)
    other.resume(200.0, opening)
    (note,) = other.committed(203.0, 21, (), before=20)
    assert dict(note.fields)["duration_s"] == 3.0
    assert other.last is not None
    assert other.last.iteration == 20


def test_marks_of_a_future_that_was_given_up_are_forgotten() -> None:
    run = Run(on_disk={"r2a": [kept(1, 10)]})
    run.recovery.checkpoint = 18
    run.recovery.marks = (mark(10), mark(20))
    run.recovery.checkpoint = None
    plan_of(run)
    assert [mark.iteration for mark in run.recovery.marks] == [10]


def test_a_leader_whose_run_goes_back_tells_no_loss_of_what_was_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(on_disk={"r3b": [kept(1, 20)]})
    plan = plan_of(run)
    leader = Leader(D0, STAGED, FACTS, lambda: 0)
    leader.view, leader.loss = run.view, 2.5
    leader.iteration, leader.committed = Iteration(26, 1), Iteration(25, 1)
    monkeypatch.setattr(leader.recovery, "decide", lambda *_: (plan, []))
    leader.loads_told(1.0, ())
    assert (leader.committed.number, leader.loss) == (20, None)


def test_two_marks_are_kept_and_a_new_one_replaces_later_ones() -> None:
    marks = add_mark(add_mark(add_mark((), mark(10)), mark(20)), mark(30))
    assert [m.iteration for m in marks] == [20, 30]
    assert [m.iteration for m in add_mark(marks, mark(20))] == [20]
