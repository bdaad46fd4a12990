"""What a page remembers of a run: losses, and who came and went."""

from itertools import pairwise
from pathlib import Path

from decod.ids import NodeId
from decod.journal.history import (
    EVENTS_MAX,
    FORMER_MAX,
    STEPS_MAX,
    TOLD_MAX,
    RunHistory,
    SeenMember,
)
from decod.journal.iteration_file import IterationFile, read_curve
from tests.support.noted import noted


def member(name: str, done: int | None = 0, stage: int = 1) -> SeenMember:
    return SeenMember(NodeId(name), name, stage, done)


def commit(history: RunHistory, iteration: int, loss: float | None = 2.0) -> None:
    fields = {"iteration": f"{iteration}.1", "loss": loss, "num_tokens": 10}
    history.take(noted("step.committed", fields, float(iteration)))


def kinds(history: RunHistory) -> list[tuple[str, str]]:
    return [(event.kind, event.name) for event in history.events]


def test_a_reader_gets_only_what_is_new() -> None:
    history = RunHistory()
    for iteration in (1, 2, 3):
        commit(history, iteration)
    first = history.since("", 0, 0)
    assert [step[0] for step in first["steps"]] == [1, 2, 3]
    commit(history, 4)
    then = history.since(first["generation"], first["num_steps"], first["num_events"])
    assert then["steps"] == [[4, 4.0, 2.0, 10.0]]
    assert then["generation"] == first["generation"]


def test_a_reader_of_another_daemon_gets_all() -> None:
    history = RunHistory()
    commit(history, 1)
    assert len(history.since(RunHistory().generation, 1, 0)["steps"]) == 1


def test_what_a_run_takes_back_is_told_anew() -> None:
    history = RunHistory()
    for iteration in (1, 2, 3):
        commit(history, iteration)
    before = history.generation
    history.take(noted("run.returned", {"iteration": 1}, 4.0))
    commit(history, 2, loss=1.0)
    news = history.since(before, 3, 0)
    assert news["generation"] != before
    assert [step[:3:2] for step in news["steps"]] == [[1, 2.0], [2, 1.0]]


def test_old_iterations_are_thinned_out_and_the_newest_kept() -> None:
    history = RunHistory()
    for iteration in range(1, 3 * STEPS_MAX):
        commit(history, iteration)
    steps = history.since("", 0, 0)["steps"]
    assert len(steps) <= STEPS_MAX
    assert steps[0][0] == 1
    assert [step[0] for step in steps[-100:]] == list(range(3 * STEPS_MAX - 100, 3 * STEPS_MAX))


def test_a_member_that_is_lost_is_told_at_once_and_once() -> None:
    history = RunHistory()
    history.see([member("a"), member("b", 7)], time_s=1.0)
    history.take(noted("member.lost", {"peer": "b", "reason": "silent"}, 2.0))
    assert kinds(history) == [("there", "a"), ("there", "b"), ("lost", "b")]
    assert history.lost == {"b"}
    history.see([member("a")], time_s=3.0)
    assert len(history.events) == 3
    assert not history.lost
    assert history.events[-1].reason == "silent"
    assert [(one.name, one.num_microbatches) for one in history.former()] == [("b", 7)]


def test_a_member_that_leaves_goes_when_the_view_says_so() -> None:
    history = RunHistory()
    history.see([member("a"), member("b")], time_s=1.0)
    history.take(noted("member.leaving", {"peer": "b", "reason": "drained"}, 2.0))
    history.see([member("a"), member("b", 3)], time_s=3.0)
    assert len(history.events) == 2
    history.see([member("a")], time_s=4.0)
    assert kinds(history)[-1] == ("left", "b")
    assert (history.num_left, history.num_lost) == (1, 0)


def test_one_who_is_not_the_leader_says_only_that_a_member_is_gone() -> None:
    history = RunHistory()
    history.see([member("a"), member("b")], time_s=1.0)
    history.see([member("a")], time_s=2.0)
    assert kinds(history)[-1] == ("gone", "b")


def test_work_of_earlier_lives_counts() -> None:
    history = RunHistory()
    history.see([member("a"), member("b", 5)], time_s=1.0)
    history.see([member("a")], time_s=2.0)
    history.see([member("a"), member("b", 2)], time_s=3.0)
    assert kinds(history)[-1] == ("came", "b")
    assert history.total(NodeId("b")) == 7
    history.see([member("a"), member("b", 1)], time_s=4.0)
    assert history.total(NodeId("b")) == 8
    assert history.total(NodeId("c")) is None


def test_a_lost_member_that_is_in_the_next_iteration_has_come_back() -> None:
    history = RunHistory()
    history.see([member("a"), member("b")], time_s=1.0)
    history.take(noted("member.lost", {"peer": "b", "reason": "silent"}, 2.0))
    history.see([member("a"), member("b")], time_s=3.0)
    assert not history.lost
    assert kinds(history)[-1] == ("came", "b")


def test_memory_is_bounded_however_many_come_and_go() -> None:
    history = RunHistory()
    history.see([member("a")], time_s=0.0)
    for index in range(2 * FORMER_MAX):
        history.see([member("a"), member(f"n{index}")], time_s=1.0)
    history.see([member("a")], time_s=2.0)
    assert len(history.events) <= EVENTS_MAX
    assert len(history.former()) == FORMER_MAX
    assert history.former()[-1].name == f"n{2 * FORMER_MAX - 1}"


def test_another_daemon_goes_on_with_the_losses_of_the_one_before() -> None:
    """The time in which no daemon ran belongs to no iteration."""
    spoilt = noted("step.committed", {"iteration": "yesterday", "num_tokens": 1})
    before, history = [noted("node.started", {}), spoilt], RunHistory()
    for iteration in (1, 2):
        fields = {"iteration": f"{iteration}.1", "loss": 2.0, "num_tokens": 10}
        before.append(noted("step.committed", fields, float(iteration)))
    history.restore(before)
    history.take(noted("node.started", {}, 1000.0))
    history.take(noted("step.committed", fields | {"iteration": "3.1"}, 1001.0))
    assert history.since("", 0, 0)["steps"] == [
        [1, 1.0, 2.0, None],
        [2, 2.0, 2.0, 10.0],
        [3, 1001.0, 2.0, None],
    ]
    history.restore(before)
    assert len(history.since("", 0, 0)["steps"]) == 3, "a second life of the node changes nothing"


def test_a_loss_costs_what_the_iteration_took_longer() -> None:
    history = RunHistory()
    history.see([member("a"), member("b")], time_s=0.0)
    for iteration in range(1, 6):
        commit(history, iteration)
    before = history.generation
    history.take(noted("member.lost", {"peer": "b", "reason": "silent"}, 5.5))
    assert history.events[-1].cost_s is None
    fields = {"iteration": "6.1", "loss": 2.0, "num_tokens": 10}
    history.take(noted("step.committed", fields, 8.5))
    lost = history.events[-1]
    assert (lost.iteration, lost.cost_s) == (5, 2.5)
    assert history.generation != before, "readers get it again"
    history.take(noted("step.committed", fields | {"iteration": "7.1"}, 9.5))
    assert history.events[-1].cost_s == 2.5


def test_a_node_that_came_late_learns_the_curves_from_the_leader() -> None:
    leader, late = RunHistory(), RunHistory()
    for iteration in range(1, 1001):
        commit(leader, iteration, loss=5.0 - iteration / 500)
        if not iteration % 2:
            evaluated = {"iteration": iteration, "loss": 1.0}
            leader.take(noted("evaluation.done", evaluated, float(iteration)))
        if iteration > 900:
            commit(late, iteration)
    told = leader.told()
    assert len(told["steps"]) <= TOLD_MAX
    assert len(told["held_out"]) <= TOLD_MAX
    assert told["steps"][-1][0] == 1000
    for _ in range(2):
        late.learn(told["steps"], told["held_out"])
    news = late.since("", 0, 0)
    iterations = [step[0] for step in news["steps"]]
    assert iterations == sorted(set(iterations))
    assert iterations[0] < 10
    assert iterations[-100:] == list(range(901, 1001))
    assert news["held_out"] == told["held_out"]


def test_a_node_that_was_away_learns_what_it_has_missed() -> None:
    leader, relay = RunHistory(), RunHistory()
    for iteration in range(1, 1001):
        commit(leader, iteration)
        if not 300 < iteration < 700:
            commit(relay, iteration)
    before = relay.generation
    told = leader.told()["steps"]
    relay.learn(told, [])
    assert relay.generation != before
    iterations = [step[0] for step in relay.since("", 0, 0)["steps"]]
    assert iterations == sorted(set(iterations))
    assert set(iterations) - set(range(300, 701)) == {*range(1, 300), *range(701, 1001)}
    assert len([one for one in iterations if 300 < one < 700]) > 20
    after = relay.generation
    commit(leader, 1001)
    relay.learn(leader.told()["steps"], [])
    assert relay.generation == after, "the gap is filled once"


def test_turns_of_a_run_are_events_also_after_a_restart() -> None:
    turns = [
        noted("checkpoint.written", {"iteration": 1}, 1.5),
        noted("leader.elected", {"term": 2, "num_votes": 3}, 1.6),
        noted("run.recut", {"iteration": 1, "blocks": "1, 2", "duration_s": 1.0}, 1.7),
        noted("run.returned", {"iteration": 1, "reason": "stage 1 lost"}, 1.8),
    ]
    history = RunHistory()
    first = noted("step.committed", {"iteration": "1.1", "loss": 2.0, "num_tokens": 10}, 1.0)
    history.restore([first, *turns])
    assert [(one.kind, one.iteration) for one in history.events] == [
        ("checkpoint", 1),
        ("elected", 1),
        ("recut", 1),
        ("returned", 1),
    ]
    assert history.events[-1].reason == "stage 1 lost"


def test_the_table_of_iterations_gives_the_whole_curve(tmp_path: Path) -> None:
    """The journal on the disk may begin later, since its oldest files are removed."""
    path = tmp_path / "iterations.csv"
    file = IterationFile(path)
    time = "2026-01-02T03:04:05.678Z"
    file.add([{"iteration": i, "time": time, "loss": 3.0} for i in range(1, 6)])
    file.add([{"iteration": 6, "time": time, "tokens_per_s": 12.5}])
    file.close()
    with path.open("a") as spoilt:
        spoilt.write("7,yesterday,1\n")
    history = RunHistory()
    kept = noted("step.committed", {"iteration": "6.1", "loss": 2.0, "num_tokens": 10}, 9.0)
    history.restore([kept], read_curve(path))
    steps = history.since("", 0, 0)["steps"]
    assert [step[0] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0] == [1, 1767323045.7, 3.0, None]
    assert steps[-1] == [6, 9.0, 2.0, None]


def test_a_leader_that_tells_ever_earlier_points_takes_no_more_memory() -> None:
    history = RunHistory()
    commit(history, 10**6)
    for look in range(1, 100):
        first = 10**6 - 120 * look
        history.learn([[first + n, 1.0, 2.0, None] for n in range(120)], [])
    assert len(history.since("", 0, 0)["steps"]) <= STEPS_MAX


def test_a_long_run_keeps_its_past() -> None:
    history = RunHistory()
    for iteration in range(1, 20_001):
        commit(history, iteration)
    for curve, gap_max in (
        (history.since("", 0, 0)["steps"], 64),
        (history.told()["steps"], 400),
    ):
        iterations = [step[0] for step in curve]
        assert len(iterations) <= STEPS_MAX
        assert max(b - a for a, b in pairwise([0, *iterations])) <= gap_max
        assert iterations[-1] == 20_000


def test_a_lying_leader_spoils_nothing_of_what_this_node_knows() -> None:
    history = RunHistory()
    for iteration in range(1, 101):
        if not 40 < iteration < 60:
            commit(history, iteration)
    own = [step[0] for step in history.since("", 0, 0)["steps"]]
    lies = [[1 + n / 7, 1.0, 2.0, None] for n in range(500)]
    lies += [[-n, 1.0, 2.0, None] for n in range(120)]
    history.learn(lies, [(2**53 - 1, 0.01), (100, 0.01)], [(10**18, "a", "b")])
    known = history.since("", 0, 0)
    assert [step[0] for step in known["steps"]] == own
    assert (known["held_out"], known["texts"]) == ([(100, 0.01)], [])
    history.take(noted("evaluation.done", {"iteration": 100, "loss": 2.5}, 200.0))
    assert history.since("", 0, 0)["held_out"] == [(100, 2.5)], "its own word counts"


def test_a_long_table_of_iterations_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "iterations.csv"
    time = "2026-01-02T03:04:05.678Z"
    rows = "".join(f"{number},{time},2.5\n" for number in range(1, 25_001))
    path.write_text("iteration,time,loss,tokens_per_s\n" + rows)
    points = read_curve(path)
    assert len(points) <= 10_000
    assert (points[0][0], points[-1][0]) == (1, 25_000)
    assert points[-1][2:] == [2.5, None]


def test_texts_that_a_run_takes_back_are_gone_and_stay_so() -> None:
    history = RunHistory()

    def write(iteration: int) -> None:
        fields = {"iteration": iteration, "prompt": "Once", "text": str(iteration)}
        history.take(noted("text.written", fields, float(iteration)))

    commit(history, 100)
    for iteration in (50, 100):
        write(iteration)
    history.take(noted("run.returned", {"iteration": 40}, 4.0))
    write(30)
    write(60)
    history.learn([], [], history.told()["texts"])
    assert [text[0] for text in history.texts] == [30, 60]


def test_a_loss_that_is_no_number_and_a_spoilt_table_are_left_out(tmp_path: Path) -> None:
    history = RunHistory()
    commit(history, 1, loss=float("nan"))
    assert history.since("", 0, 0)["steps"][0][2] is None
    path = tmp_path / "iterations.csv"
    line = "1,2026-01-02T03:04:05.678Z,inf,\n"
    path.write_text("iteration,time,loss,tokens_per_s\n" + line + "\0" * 200_000)
    assert [point[2] for point in read_curve(path)] == [None]
