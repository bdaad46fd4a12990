"""What `decod why` says of records whose story is known."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.clocks import wall_clock
from decod.errors import ConfigError, DataError, NotRunningError
from decod.exit_codes import ExitCode
from decod.insight import why_evidence as reading
from decod.insight.why import answers_of
from decod.insight.why_evidence import (
    LOG_READ_MAX_BYTES,
    Explanation,
    WhyQuestion,
    newest_lines,
    records_of,
)
from decod.journal.records import Mode, RoundRow
from tests.support.node_records import (
    OTHER,
    OWN,
    ROUND,
    status_of,
    write_iterations,
    write_log,
    write_rounds,
)


@pytest.fixture
def no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing answers, whatever this host runs."""
    says(monkeypatch, None)


def says(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | None) -> None:
    """Makes the daemon answer with a status; None if none runs."""

    def ask(*_: object, **__: object) -> dict[str, Any]:
        if status is None:
            raise NotRunningError("none", why="none", fix="none") from FileNotFoundError()
        return status

    monkeypatch.setattr(reading, "ask", ask)


def answer(folder: Path, question: str) -> Explanation:
    (found,) = answers_of(records_of(folder), WhyQuestion(question))
    return found


def value(found: Explanation, name: str) -> Any:
    return next(figure.value for figure in found.figures if figure.name == name)


# --- idle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "run_state", "changes", "cause", "remedy"),
    [
        ("paused", "training", {"capacity": 0}, "operator of this node has paused", "decod resume"),
        ("draining", "training", {}, "leaves the run", "wait"),
        ("reconnecting", "reconnecting", {}, "looks for it", "decod doctor"),
        ("syncing", "training", {}, "loads the state", "wait"),
        ("joining", "training", {}, "on its way into the run", "wait a minute"),
        ("training", "gathering", {}, "does not train now (gathering)", "start a relay"),
        ("training", "waiting", {}, "does not train now (waiting)", "bring the missing nodes back"),
        ("paused", "paused", {"capacity": 4}, "does not train now (paused)", "nothing"),
    ],
)
def test_a_status_tells_why_a_node_is_idle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    run_state: str,
    changes: dict[str, Any],
    cause: str,
    remedy: str,
) -> None:
    status = status_of(run_state=run_state, state=state, message="NO QUORUM: badger is gone")
    status["node"] |= {"state": state, **changes}
    says(monkeypatch, status)
    found = answer(tmp_path, "idle")
    assert (found.applies, found.known) == (True, True)
    assert cause in found.cause
    assert remedy in found.remedy
    if run_state == "waiting":
        assert "NO QUORUM: badger is gone" in found.cause


def test_a_relay_without_flows_is_told_who_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_of()
    status["stages"][1]["nodes"][0]["flows"] = 0
    says(monkeypatch, status)
    found = answer(tmp_path, "idle")
    assert "no flow passes through this node" in found.cause
    assert value(found, "stage_num_flows") == 4
    assert found.known
    status["stages"][1]["nodes"][1]["flows"] = 0
    found = answer(tmp_path, "idle")
    assert "no flow passes through stage 1 now" in found.cause
    assert not found.known
    status["organisation"] = "servers"
    assert "flow" not in answer(tmp_path, "idle").cause, "servers have none"


def test_a_node_that_has_paused_itself_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = status_of(state="paused")
    status["node"] |= {"state": "paused", "capacity": 0}
    status["pausing"] = {"by_person": False, "causes": [{"name": "hot", "detail": "GPU: 95 °C"}]}
    says(monkeypatch, status)
    found = answer(tmp_path, "idle")
    assert found.cause == "this node has paused itself: GPU: 95 °C"
    assert "decod set" in found.remedy
    status["pausing"]["by_person"] = True
    assert "the operator" in answer(tmp_path, "idle").cause


def test_a_waiting_device_is_told_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = replace(ROUND, matchmaking_s=0.1, averaging_s=0.2, sending_s=0.4)
    write_rounds(tmp_path, row=row)
    status = status_of() | {"sync": {"every": 30, "fragments": 1, "delay": 3}}
    says(monkeypatch, status)
    slow = [figure.text for figure in answer(tmp_path, "slow").figures]
    assert "averages arrive after 3 of 30 iterations" in slow
    found = answer(tmp_path, "idle")
    assert "waits 80 % of the time" in found.cause
    assert "tensors of other stages (50 %)" in found.cause
    shares = ("compute", "wait", "wait_start", "wait_passes", "wait_average", "transfer")
    assert [value(found, f"{name}_share") for name in shares] == [0.2, 0.8, 0.1, 0.5, 0.2, 0.4]
    assert value(found, "costliest_hop_s") == 0.3
    assert any("from this node to leader" in figure.text for figure in found.figures)


def test_a_busy_node_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rounds(tmp_path, row=replace(ROUND, forward_s=0.3, backward_s=0.5))
    says(monkeypatch, status_of())
    found = answer(tmp_path, "idle")
    assert not found.applies
    assert "computes 80 % of the time" in found.cause
    assert not answers_of(records_of(tmp_path))


def test_a_node_that_has_not_trained_yet_is_not_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, status_of())
    for question in ("idle", "slow"):
        found = answer(tmp_path, question)
        assert (found.known, found.applies) == (False, False)
        assert "don't tell" in found.cause


def test_a_candidate_is_told_why_it_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"level": "warning", "reason": "no stage needs it"}
    write_log(
        tmp_path, *[(wall_clock() - 30 + number, "candidate.refused", fields) for number in (1, 2)]
    )
    status = status_of()
    status["node"]["state"] = "joining"
    says(monkeypatch, status)
    found = answer(tmp_path, "idle")
    assert "no stage needs it" in found.cause
    assert value(found, "num_refused") == 2
    # That was another life, and nothing is known of this one.
    write_log(tmp_path, (wall_clock() - 10, "node.started", {}))
    found = answer(tmp_path, "idle")
    assert "its records don't say what it waits for" in found.cause
    assert not found.known


@pytest.mark.usefixtures("no_daemon")
@pytest.mark.parametrize(
    ("reason", "cause", "known"),
    [
        ("finished: the leader has ended the run", "the run is over", True),
        ("drained: left", "it has left the run", True),
        ("banned: noise, until tomorrow", "has banned this node: noise", True),
        ("crippled: out of memory", "compute process failed: out of memory", True),
        ("removed: the leader counts this node as lost", "went on without this node", False),
    ],
)
def test_the_log_tells_why_no_node_runs(
    tmp_path: Path, reason: str, cause: str, known: bool
) -> None:
    write_log(
        tmp_path,
        (wall_clock() - 100, "node.started", {}),
        (wall_clock() - 60, "node.stopped", {"reason": reason}),
    )
    found = answer(tmp_path, "idle")
    assert "no node runs here" in found.cause
    assert cause in found.cause
    assert (found.applies, found.known) == (True, known)
    assert found.remedy


@pytest.mark.usefixtures("no_daemon")
def test_a_log_without_a_goodbye_is_no_reason_to_guess(tmp_path: Path) -> None:
    write_log(tmp_path, (wall_clock() - 100, "node.started", {}))
    (tmp_path / "crash-20260101T000000Z-1.txt").write_text("decod why\nnot the node's")
    found = answer(tmp_path, "idle")
    assert not found.known
    assert "the records don't tell which" in found.cause
    (tmp_path / "crash-20260101T000000Z-2.txt").write_text("decod join\nTraceback ...")
    found = answer(tmp_path, "idle")
    assert found.known
    assert "crash-20260101T000000Z-2.txt" in found.cause


# --- slow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "cause", "known"),
    [
        (replace(ROUND, forward_s=0.4, backward_s=0.4), "computes 80 % of the time", True),
        (replace(ROUND, data_s=0.6), "reading data takes most of this node's time (60 %)", True),
        (replace(ROUND, averaging_s=0.7), "the average and the commit take most", True),
        (replace(ROUND, sending_s=0.8), "sends hold it up: they take 80 %", True),
        (replace(ROUND, sending_s=0.6), "its own records can't tell", False),
        (ROUND, "its own records can't tell", False),
        (replace(ROUND, matchmaking_s=0.7), "waits for its first microbatch (70 %", False),
    ],
)
@pytest.mark.usefixtures("no_daemon")
def test_own_iterations_tell_what_a_node_can_know(
    tmp_path: Path, row: RoundRow, cause: str, known: bool
) -> None:
    write_rounds(tmp_path, row=row)
    found = answer(tmp_path, "slow")
    assert cause in found.cause
    assert found.known is known
    assert found.remedy
    assert not found.applies, "no run trains here"


@pytest.mark.usefixtures("no_daemon")
def test_records_of_all_members_are_judged_as_decod_analyse_does(tmp_path: Path) -> None:
    write_rounds(tmp_path, row=replace(ROUND, peers=1, data_s=0.6))
    found = answer(tmp_path, "slow")
    assert found.known
    assert found.cause.startswith("Data hold the run back")
    assert "faster disk" in found.remedy


@pytest.mark.usefixtures("no_daemon")
def test_a_leader_knows_what_failed_attempts_cost(tmp_path: Path) -> None:
    write_rounds(tmp_path, 30)
    write_iterations(
        tmp_path,
        [
            {
                "iteration": number,
                "time": f"2026-01-01T00:{number:02}:00.000Z",
                "duration_s": 15.0,
                "tokens_per_s": 10.0 if number > 15 else 20.0,
                "attempt": 1 + number % 2,
                "era": 1,
            }
            for number in range(1, 31)
        ],
    )
    found = answer(tmp_path, "slow")
    assert "75 % of the run's time goes into attempts that failed" in found.cause
    assert (value(found, "num_repeated"), value(found, "era")) == (15, 1)
    assert value(found, "lost_share") == 0.75
    assert any("10 tokens/s" in each.text and "20 before" in each.text for each in found.figures)


def test_a_slow_run_applies_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rounds(tmp_path)
    says(monkeypatch, status_of())
    assert [each.question for each in answers_of(records_of(tmp_path))] == [
        WhyQuestion.IDLE,
        WhyQuestion.SLOW,
    ]
    says(monkeypatch, status_of(run_id="another"))
    assert not answer(tmp_path, "slow").known, "these iterations are of another run"


@pytest.mark.parametrize(
    ("by", "what", "remedy"),
    [
        ("computing", "its device computes for 92 %", "another relay in stage 1"),
        (
            "sending",
            "waiting for the uplink of badger takes about 62 % of the time, since its sends take"
            " 92 %",
            "faster uplink",
        ),
    ],
)
def test_the_status_tells_a_waiting_node_for_whom_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, what: str, remedy: str
) -> None:
    write_rounds(tmp_path)
    slow = {"id": OTHER, "name": "badger", "stage_index": 1, "by": by}
    status = status_of(slow=[slow | {"share": 0.92, "usual_share": 0.3}])
    badger = status["stages"][1]["nodes"][1]
    badger |= {"computing_s": 0.92, "waiting_s": 0.08, "sending_s": 0.1}
    says(monkeypatch, status)
    for question in ("idle", "slow"):
        found = answer(tmp_path, question)
        assert f"badger (stage 1) holds the run up: {what} of an iteration" in found.cause
        assert remedy in found.remedy
        assert found.known
    told = [each.text for each in found.figures if each.name == "member"]
    assert told == ["badger computes 92 %, waits 8 %, sends 10 %"]


def test_if_nobody_stands_out_no_records_of_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rounds(tmp_path)
    says(monkeypatch, status_of(slow=[]))
    found = answer(tmp_path, "slow")
    assert "no member computes or sends for much longer than the others" in found.cause
    assert "num_microbatches" in found.remedy


@pytest.mark.parametrize("slow", [7, [7], [{}], [{"by": "computing", "share": "x"}], [{"by": []}]])
def test_nonsense_about_slow_members_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: object
) -> None:
    write_rounds(tmp_path)
    says(monkeypatch, status_of(slow=slow))
    assert "its own records can't tell" in answer(tmp_path, "slow").cause


# --- removed ------------------------------------------------------------------------------------


def removed_log(folder: Path, *, ago_s: float, back: bool) -> None:
    at_s = wall_clock() - ago_s
    reason = "removed: the leader counts this node as lost"
    write_log(
        folder,
        (at_s - 100, "node.started", {}),
        (at_s - 40, "iteration.opened", {"iteration": "4.1"}),
        (at_s - 10, "link.broken", {"level": "warning", "peer": OTHER}),
        (at_s, "node.stopped", {"reason": reason}),
        (at_s + 1, "node.started", {}),
        *([(at_s + 5, "iteration.opened", {"iteration": "9.1"})] if back else []),
    )


@pytest.mark.parametrize(
    ("ago_s", "back", "applies"), [(60, True, True), (3600, True, False), (3600, False, True)]
)
@pytest.mark.usefixtures("no_daemon")
def test_the_log_tells_of_a_removal_and_not_of_its_cause(
    tmp_path: Path, ago_s: float, back: bool, applies: bool
) -> None:
    removed_log(tmp_path, ago_s=ago_s, back=back)
    found = answer(tmp_path, "removed")
    assert "the leader counts this node as lost" in found.cause
    assert (found.applies, found.known) == (applies, False)
    assert value(found, "silent_s") == 40.0
    assert value(found, "link.broken") == 10.0
    assert value(found, "leaders_reason") is None


def test_the_leader_tells_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removed_log(tmp_path, ago_s=60, back=True)
    recent = [
        {"age_s": 60, "event": "member.lost", "text": f"otter ({OWN[:8]}) is gone: no heartbeat"},
        {"age_s": 1, "event": "member.lost", "text": f"badger ({OTHER[:8]}) is gone: power cut"},
    ]
    says(monkeypatch, status_of(recent=recent))
    found = answer(tmp_path, "removed")
    assert found.known
    assert found.cause.endswith(f"the leader tells why: otter ({OWN[:8]}) is gone: no heartbeat")


@pytest.mark.usefixtures("no_daemon")
def test_who_left_by_itself_was_not_removed(tmp_path: Path) -> None:
    write_log(tmp_path, (wall_clock() - 60, "node.stopped", {"reason": "drained: left"}))
    found = answer(tmp_path, "removed")
    assert (found.applies, found.known, found.remedy) == (False, True, "")
    assert "was not removed" in found.cause


# --- reading ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_daemon")
def test_torn_and_strange_lines_are_left_out(tmp_path: Path) -> None:
    path = write_log(tmp_path, (wall_clock() - 60, "node.stopped", {"reason": "banned: noise"}))
    with path.open("ab") as file:
        file.write(b'\xff\xfe\n[]\n7\n{"event": 5}\n{"event": "node.stopped", "time": 1}\n')
        file.write(b'{"event": "node.stopped", "time": "x"}\n' + b"[" * 100_000 + b'\n{"eve')
    assert "banned" in answer(tmp_path, "removed").cause


@pytest.mark.usefixtures("no_daemon")
def test_an_unreadable_log_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    (tmp_path / "node.log").mkdir()
    write_rounds(tmp_path)
    records = records_of(tmp_path)
    assert records.unread == ["node.log: node.log is no ordinary file"]
    assert not answer(tmp_path, "removed").known
    assert value(answer(tmp_path, "slow"), "compute_share") == 0.2


def test_only_the_newest_part_of_a_log_is_read(tmp_path: Path) -> None:
    (tmp_path / "node.log.2").write_bytes(b"older\n" * 10)
    (tmp_path / "node.log.1").write_bytes(b"old 1\nold 2\n")
    path = tmp_path / "node.log"
    path.write_bytes(b"new\n")
    assert newest_lines(path, LOG_READ_MAX_BYTES)[-3:] == [b"old 1", b"old 2", b"new"]
    assert newest_lines(path, 12) == [b"old 2", b"new"]
    assert newest_lines(path, 2) == []


@pytest.mark.usefixtures("no_daemon")
def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        records_of(tmp_path)
    assert raised.value.code == "E-DAT-053"


@pytest.mark.usefixtures("no_daemon")
def test_a_training_script_is_sent_elsewhere(tmp_path: Path) -> None:
    write_rounds(tmp_path, row=replace(ROUND, mode=Mode.OPTIMIZER))
    with pytest.raises(ConfigError) as raised:
        answer(tmp_path, "slow")
    assert raised.value.code == "E-RUN-048"


# --- the command --------------------------------------------------------------------------------


def test_the_command_prints_cause_figures_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rounds(tmp_path)
    status = status_of()
    status["stages"][0]["nodes"][0]["name"] = "lead\x1b[31m"
    says(monkeypatch, status)
    assert main(["why", "--state-dir", str(tmp_path)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert said.startswith("IDLE  ")
    assert "\nSLOW  " in said
    assert "20 % computing" in said
    assert "Try: " in said
    assert "\x1b" not in said
    assert main(["why", "slow", "--json", "--state-dir", str(tmp_path)]) == ExitCode.OK
    told = json.loads(capsys.readouterr().out)
    (found,) = told["answers"]
    assert (found["question"], found["known"]) == ("slow", False)
    assert {"name": "compute_share", "value": 0.2} in [
        {"name": each["name"], "value": each["value"]} for each in found["figures"]
    ]


def test_the_command_says_when_there_is_nothing_to_explain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rounds(tmp_path, row=replace(ROUND, forward_s=0.5, backward_s=0.4))
    says(monkeypatch, status_of())
    assert main(["why", "--state-dir", str(tmp_path)]) == ExitCode.OK
    assert "nothing to explain" in capsys.readouterr().out
