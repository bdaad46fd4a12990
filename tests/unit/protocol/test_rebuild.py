"""How the leader decides what a lost stage is rebuilt from, and who takes it over."""

from dataclasses import dataclass, field, replace

import pytest

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, EffectSink, ReadCheckpoint
from decod.protocol.core.era import Kept, Mark, Source
from decod.protocol.core.events import CheckpointRead
from decod.protocol.core.messages.decision_messages import NodeLoad
from decod.protocol.core.messages.membership_messages import Join, Prepared
from decod.protocol.core.view import Member, Role, View
from decod.protocol.leadership.admission import Admission
from decod.protocol.leadership.seats import Seats
from decod.protocol.leadership.stage_recovery import EraPlan, StageRecovery
from decod.run.stages_config import StagesConfig
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

    def __post_init__(self) -> None:
        self.out = EffectSink[Effect]()
        self.recovery = StageRecovery(STAGED, 0, self.out)
        self.seats = Seats(STAGED.sync, self.out)
        self.admission = Admission(STAGED, FACTS, self.seats, self.out)
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
        self.out.taken()
        plan = self.recovery.decide(self.view, self.iteration, self.admission, self.seats)
        return plan, self.out.taken()

    def decide(self) -> EraPlan | None:
        self.recovery.opened(100.0, self.view, self.iteration)
        assert self.decide_without() == (None, []), "ask first"
        self.recovery.told(
            tuple(
                NodeLoad(node, 0, 2, 0, "training", tuple(self.on_disk.get(node, ())))
                for node in self.view.by_id
            )
        )
        return self.decide_without()[0]


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
    plan, effects = run.decide_without()
    assert plan is not None
    assert effects == []
    return plan


def takers(plan: EraPlan, stage: int = 1) -> set[NodeId]:
    return {m.node_id for m in plan.members if m.stage_index == stage}


def test_a_cut_waits_until_all_members_have_written_the_mark() -> None:
    """Newcomers have nothing to write; and where a stage is lost meanwhile, the old cut stays."""
    everybody = ("d0", "r1a", *ALL[1:])
    run = Run((*everybody, replace(member("r1b"), since_iteration=30)))
    recovery = run.recovery
    recovery.recut.wanted = (2, 1, 1)
    recovery.committed(0.0, 30, mark(30).hashes, before=20)
    assert recovery.needed
    run.iteration = 30
    assert run.decide() is None
    assert recovery.recut.awaited == everybody
    for name in everybody:
        run.on_disk.setdefault(name, []).append(kept(0 if name == "d0" else int(name[1]), 30))
    plan = plan_of(run)
    assert (plan.iteration, plan.cut, plan.origin.lost) == (30, (2, 1, 1), ())
    assert plan.origin.num_repeated == 0
    assert plan.origin.cut == ()
    assert not recovery.needed
    assert {m.node_id for m in plan.members} == run.view.by_id.keys()

    lost = Run(everybody)
    lost.recovery.recut.wanted = (2, 1, 1)
    lost.recovery.committed(0.0, 30, mark(30).hashes, before=20)
    lost.names = ALL
    lost.on_disk["r2a"].append(kept(1, 20))
    assert plan_of(lost).cut == ()
    assert not lost.recovery.recut.wanted


def test_a_state_of_another_cut_is_no_members_own() -> None:
    """Nothing was committed since the mark, whose stages members have cut anew."""
    run = Run(("d0", "r1a", *ALL[1:]), iteration=20)
    old = replace(mark(20), cut=(1, 1, 2))
    run.recovery.marks = (old,)
    run.on_disk = {}
    run.names = ALL
    plan = plan_of(run)
    assert plan.origin.source is Source.START


def test_an_older_mark_serves_where_the_newest_is_not_complete() -> None:
    plan = plan_of(Run(on_disk={"r2a": [kept(1, 10)]}))
    assert (plan.iteration, plan.origin.num_repeated) == (10, 15)


def test_who_holds_the_state_takes_the_stage_over_else_one_of_the_largest() -> None:
    assert takers(plan_of(Run(on_disk={"r2b": [kept(1, 20)]}))) == {R2B}
    assert takers(plan_of(Run(on_disk={"d0": [kept(1, 20)]}))) == {R3A}


def test_no_stage_gives_its_last_worker_and_who_leaves_goes_nowhere() -> None:
    run = Run(("d0", "r2a", "r3a", "r3b"), on_disk={"r2a": [kept(1, 20)]})
    assert takers(plan_of(run)) == {R3A}
    run = Run(("d0", "r2a", "r3a", "r3b"), on_disk={"r2a": [kept(1, 20)]})
    run.seats.leave_out(R3A)
    assert run.decide() is None
    assert run.recovery.waiting
    assert not run.recovery.hopeless
    assert "waits for a host" in run.recovery.describe()


def test_a_host_that_comes_back_brings_its_state() -> None:
    run = Run()
    run.join("r1a", stage=1, states=(kept(1, 20),))
    plan = plan_of(run)
    assert (plan.iteration, plan.origin.holders_of(1)) == (20, (R1A,))


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
        assert run.decide_without() == (None, expected)
    run.recovery.read(CheckpointRead(9, None))
    assert run.recovery.checkpoint == 22, "an answer to another question"
    run.recovery.read(CheckpointRead(22, 22))
    plan, _ = run.decide_without()
    assert plan is not None
    assert plan.iteration == 22


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


def test_whoever_is_there_already_gives_it_to_the_others() -> None:
    """A disk was bad, but somebody of the stage had read it."""
    begun = Begun()
    begun.lose(20, 2)
    plan = begun.again(R2B)
    assert plan is not None
    assert (plan.iteration, plan.origin.holders_of(2)) == (20, (R2A,))


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
