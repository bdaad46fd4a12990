"""`decod status` against a socket that answers like a daemon."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from decod.cli import status_command
from decod.cli.main import main
from decod.cli.options import DurationType
from decod.cli.status_command import Show, is_well, watch
from decod.cli.status_view import NUM_NODES_SHOWN_MAX, make_console, render_status
from decod.daemon.control import folders_of_host
from decod.errors import NotRunningError
from tests.support.fake_daemon import FakeDaemon, node, status_answer
from tests.support.systems import linux_alone


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path)
    yield fake
    fake.close()


def text_of(answer: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    make_console().print(render_status(answer))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("role", "num_vouched", "said"),
    [
        ("relay", 1204, "vouched for"),
        ("relay", 1200, "1,200 vouched for"),
        ("data", 0, "its own word"),
    ],
)
def test_a_line_says_what_the_node_has_contributed(
    role: str, num_vouched: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = {"num_microbatches": 1204, "num_tokens": 2_400_000, "num_vouched": num_vouched}
    answer = status_answer(node=node("me", role=role), contributed=done)
    line = f"contributed: 1,204 microbatches, 2.4 M tokens ({said})"
    assert line in text_of(answer, capsys).splitlines()
    answer["contributed"] = done | {"num_microbatches": 0}
    assert "contributed" not in text_of(answer, capsys)


def test_small_counts_of_tokens_are_told_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    done = {"num_microbatches": 8, "num_tokens": 4096, "num_vouched": 8}
    text = text_of(status_answer(node=node("me", role="relay"), contributed=done), capsys)
    assert "contributed: 8 microbatches, 4,096 tokens (vouched for)" in text


def test_a_line_says_what_was_audited(capsys: pytest.CaptureFixture[str]) -> None:
    done = {
        "num_audited": 21,
        "num_worked": 1000,
        "waited_s": 12.3,
        "chances": {"1": 0.02, "10": 0.183, "100": 0.867},
        "liars": {},
    }
    line = (
        "audited: 2.1 % of relays' work, 0 liars found; waited 12 s for that. "
        "A relay that lies is caught: 2 % after 1, 18 % after 10, 87 % after 100 lies"
    )
    assert line in " ".join(text_of(status_answer(audits=done), capsys).split())
    found = text_of(status_answer(audits=done | {"liars": {"a": "zero"}}), capsys)
    assert "1 liar found" in found


def test_the_table_shows_run_node_and_stages(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--state-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("   ") == [
        "run wiki",
        "training",
        "iteration 12",
        "loss 2.9131",
        "1,830 tokens/s",
        "leader data-1 (term 1)",
    ]
    assert lines[1].startswith("you data-1 (data-1-i)")
    assert "stage 2 has no member" in lines
    (header,) = [line for line in lines if line.startswith("STAGE")]
    assert header.split() == ["STAGE", "NODE", "STATE", "CAPACITY", "FLOWS", "DONE", "ADDRESS"]
    rows = [line.split() for line in lines[lines.index(header) + 1 :]]
    assert rows[0] == ["0", "data", "data-1", "training", "4", "3", "120", "127.0.0.1:7701"]
    assert rows[1][:3] == ["1", "relay-1", "training"]
    assert rows[2][:2] == ["relay-2", "syncing"]
    assert rows[3][:3] == ["2", "nobody", "empty"]
    assert "waiting to enter: relay-9" in lines
    assert daemon.requests == [{"command": "status"}]


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_join_command_can_be_copied_whatever_the_terminals_width(
    daemon: FakeDaemon,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    daemon.answer["join_string"] = join_string = "decod1-" + "x" * 150 + "@127.0.0.1:7700"
    assert main(["status", "--state-dir", str(tmp_path)]) == 0
    assert f"join with: decod join {join_string}" in capsys.readouterr().out.splitlines()


def test_a_paused_node_is_shown_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    paused = node("relay-1", state="paused", capacity=0, flows=0)
    text = text_of(status_answer(stages=[{"index": 1, "nodes": [paused]}], node=paused), capsys)
    assert "you relay-1 (relay-1-)   paused" in text
    (row,) = [line for line in text.splitlines() if line.startswith("1 ")]
    assert row.split() == ["1", "relay-1", "paused", "0", "0", "120", "127.0.0.1:7701"]
    assert not is_well(status_answer(state="paused"))


def test_json_is_the_daemons_object_on_one_line(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    assert json.loads(text) == daemon.answer


def test_without_a_daemon_the_exit_code_is_7(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--state-dir", str(tmp_path / "none")]) == 7
    assert "E-RUN-001" in capsys.readouterr().err


def test_another_release_is_named_unless_json_is_asked_for(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = {"schema_version": 2, "decod_version": "9.0"}
    assert main(["status", "--state-dir", str(tmp_path)]) == 7
    assert "decod 9.0" in capsys.readouterr().err
    assert main(["status", "--json", "--state-dir", str(tmp_path)]) == 0


def test_an_error_of_the_daemon_keeps_its_exit_code(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = {"code": "E-HW-009", "what": "a", "why": "b", "fix": "c", "exit_code": 6}
    daemon.answer = {"error": error}
    assert main(["status", "--state-dir", str(tmp_path)]) == 6
    assert capsys.readouterr().err == "error: E-HW-009 a: b. Try: c\n"


@pytest.mark.parametrize(
    ("run_state", "state", "well"),
    [
        ("training", "training", True),
        ("aggregating", "aggregating", True),
        ("training", "syncing", True),
        ("training", "joining", False),
        ("training", "isolated", False),
        ("gathering", "training", False),
        ("waiting", "training", False),
        ("paused", "paused", False),
        ("finished", "paused", False),
    ],
)
def test_check_tells_training_from_merely_running(
    daemon: FakeDaemon, tmp_path: Path, run_state: str, state: str, well: bool
) -> None:
    daemon.answer = status_answer(run_state=run_state, state=state)
    assert is_well(daemon.answer) is well
    assert main(["status", "--check", "--state-dir", str(tmp_path)]) == (0 if well else 8)


def test_names_of_peers_are_neither_markup_nor_control_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = "[red]x[/red]\x1b[2J\nrun forged :smile:"
    stages = [{"index": 1, "nodes": [node(evil[:30])]}]
    text = text_of(status_answer(stages=stages, message=evil, run_name=evil), capsys)
    assert "\x1b" not in text
    assert "[red]x[/red]?[2J run forged :smile:" in text
    assert not any(line.startswith("run forged") for line in text.splitlines())


def test_a_daemon_that_knows_little_yet_is_drawn_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = status_answer(
        loss=None, tokens_per_s=None, leader=None, node={}, stages=None, candidates=[], message=""
    )
    text = text_of(answer | {"join_string": None}, capsys)
    assert "loss -" in text
    assert text_of({"schema_version": 1}, capsys).startswith("run -")


def test_a_large_run_is_summed_up_by_stage(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node(f"n{number}") for number in range(NUM_NODES_SHOWN_MAX)]
    stages = [{"index": 1, "nodes": nodes}, {"index": 2, "nodes": [node("alone")]}]
    rows = [line.split() for line in text_of(status_answer(stages=stages), capsys).splitlines()]
    num = NUM_NODES_SHOWN_MAX
    assert ["1", str(num), "nodes", str(4 * num), str(3 * num), str(120 * num)] in rows
    assert ["2", "1", "node", "4", "3", "120"] in rows


@pytest.mark.parametrize("num_clients", [1, NUM_NODES_SHOWN_MAX])
def test_servers_and_clients_are_told_apart(
    num_clients: int, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = [node(f"{d}-1") | {"role": "relay", "duty": d} for d in ("frontal", "backward")]
    clients = [node(f"c{number}") | {"role": "client"} for number in range(num_clients)]
    text = text_of(status_answer(stages=[{"index": 1, "nodes": [*servers, *clients]}]), capsys)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "STAGE NODE ROLE STATE CAPACITY FLOWS DONE ADDRESS" in lines
    if num_clients == 1:
        assert any(line.startswith("1 frontal-1 frontal server training 4") for line in lines)
        assert any(line.startswith("backward-1 backward server training 4") for line in lines)
        assert any(line.startswith("c0 client training 4") for line in lines)
    else:
        roles = f"1 frontal server, 1 backward server, {num_clients} clients"
        assert any(line.startswith(f"1 {num_clients + 2} nodes {roles} ") for line in lines)


def test_the_only_server_of_a_stage_has_both_duties(capsys: pytest.CaptureFixture[str]) -> None:
    server = node("only") | {"role": "relay", "duty": "frontal"}
    nodes = [server, node("c0") | {"role": "client"}]
    text = text_of(status_answer(stages=[{"index": 1, "nodes": nodes}]), capsys)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("1 only server training 4") for line in lines)


def test_flows_are_shown_hop_by_hop_and_equal_ones_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = {name: node(name)["id"] for name in ("data-1", "relay-1", "relay-2")}
    path = [ids["data-1"], ids["relay-1"], "stranger-id", ids["data-1"]]
    flow = {"data_node": ids["data-1"], "path": path, "costs_s": [0.031, 0.5, 0.0014]}
    other = flow | {"path": [ids["data-1"], ids["relay-2"]], "costs_s": [0.02]}
    answer = status_answer(flows=[flow, flow | {"slot": 1}, other, {"path": 3}])
    make_console().print(render_status(answer, flows=True))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "1 20 data-1 -20> relay-2" in lines
    assert "2 532 data-1 -31> relay-1 -500> stranger -1> data-1" in lines

    make_console().print(render_status(answer))
    assert "-31>" not in capsys.readouterr().out


def test_watching_prints_block_after_block_and_ends_with_ctrl_c(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = [status_answer(iteration=number) for number in (1, 2)]
    pauses = iter([None])

    def pause() -> None:
        if next(pauses, "over") == "over":
            raise KeyboardInterrupt

    assert watch(lambda: answers.pop(0), Show(as_json=True), pause=pause) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2]


def test_top_is_another_name_of_watching(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    waits = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(status_command, "_read", lambda _: status_answer())
    monkeypatch.setattr(status_command.time, "sleep", sleep)
    shown = []
    for words in (["top"], ["status", "--watch"]):
        assert main([*words, "--state-dir", str(tmp_path)]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != ""
    assert waits == [2.0, 2.0]


def test_watching_ends_with_the_daemon() -> None:
    def read() -> dict[str, Any]:
        raise NotRunningError("gone", why="w", fix="f")

    with pytest.raises(NotRunningError):
        watch(read, Show(), pause=lambda: None)


@pytest.mark.parametrize(
    ("text", "duration_s"), [("2s", 2.0), ("500ms", 0.5), ("1.5m", 90.0), ("24h", 86400.0)]
)
def test_a_length_of_time_has_a_unit(text: str, duration_s: float) -> None:
    assert DurationType(minimum_s=0.2).convert(text, None, None) == duration_s


@pytest.mark.parametrize("text", ["2", "", "s", "-1s", "1e3s", "nan s", "0s", "25h", "٣s", "1ss"])
def test_what_is_no_length_of_time_is_a_usage_error(text: str) -> None:
    with pytest.raises(click.BadParameter):
        DurationType(minimum_s=0.2).convert(text, None, None)


def test_checking_and_watching_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--check", "--watch"]) == 2
    assert "leave out --watch" in capsys.readouterr().err


def test_status_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from decod.cli.main import main; "
        f"assert main(['status', '--state-dir', {str(tmp_path)!r}]) == 7; "
        "import decod.cli.status_view; "
        "heavy = {'torch', 'grpc', 'numpy', 'pydantic', 'pydantic_core', 'google.protobuf'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert result.returncode == 0, result.stderr


def test_what_went_wrong_lately_is_shown_with_its_age(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recent = [{"age_s": 3.0 + k, "text": f"otter-{k} is gone\x1b"} for k in range(7)]
    shown = text_of(status_answer(recent=recent), capsys)
    assert "3 s ago" not in shown, "the newest five, which are the last"
    assert "9 s ago  otter-6 is gone" in shown
    assert "\x1b" not in shown


def test_it_says_how_often_members_average_and_how_late_averages_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sync = {"method": "diloco", "every": 60, "fragments": 2, "bits": 4, "delay": 3}
    sync |= {"travel_s": 8.2, "budget_s": 41.0}
    shown = text_of(status_answer(sync=sync), capsys)
    expected = "averaging every 60 iterations, in 2 fragments, 4 bits: 8 s of 41 s"
    assert f"{expected}; averages arrive after 3 of 30 iterations" in " ".join(shown.split())


def test_a_newcomer_sees_why_it_waits_and_how_long() -> None:
    syncing = {
        "stage_index": 2,
        "iteration": 40,
        "why": "it lacks [b]2[/b] nodes",
        "percent": 31.4,
        "bytes_per_s": 3 * 2**20,
        "left_s": 12.6,
    }
    console = make_console()
    with console.capture() as capture:
        console.print(render_status(status_answer(syncing=syncing)))
    line = next(line for line in capture.get().splitlines() if line.startswith("fetching"))
    assert "stage 2 (why there: it lacks [b]2[/b] nodes): 31 %, 3.0 MiB/s, 13 s until" in line


@linux_alone
def test_without_a_daemon_in_its_folder_it_lists_those_of_this_host(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer = status_answer(node=node("brave-otter", role="relay"), state="training")
    other = tmp_path / "nobody"
    assert main(["status", "--state-dir", str(other)]) == 7
    said = capsys.readouterr()
    assert f"E-RUN-001 no daemon answers in {other}" in said.err
    (line,) = [each for each in said.out.splitlines() if str(tmp_path) in each]
    assert line == f"decod status --state-dir {tmp_path}   # brave-otter, training, run wiki"
    daemon.answer = {"collaboration": 1, "run": "shm"}
    assert main(["status", "--state-dir", str(other)]) == 7
    (line,) = [each for each in capsys.readouterr().out.splitlines() if str(tmp_path) in each]
    assert line == f"decod optimizer status --state-dir {tmp_path}   # a node, running, run shm"
    assert main(["status", "--state-dir", str(other), "--json"]) == 7
    assert capsys.readouterr().out == ""


@linux_alone
def test_the_systems_list_names_the_folders_of_daemons(tmp_path: Path) -> None:
    table = tmp_path / "unix"
    head = "Num       RefCount Protocol Flags    Type St Inode Path"
    begin = "0000000000000000: 00000002 00000000 00010000 0001 01 4321"
    paths = ["/b/state/decod.sock", "/a b/decod.sock", "/c/other.sock", "@decod/x", "decod.sock"]
    paths += ["/proc/self/fd/7/decod.sock", "/b/state/decod.sock"]
    table.write_text("\n".join([head, begin, *(f"{begin} {path}" for path in paths)]))
    assert folders_of_host(table) == [Path("/a b"), Path("/b/state")]
    assert folders_of_host(tmp_path / "missing") == []


def test_time_tokens_and_devices_come_before_the_odds_of_audits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spent = {"computing_s": 9.0, "waiting_s": 1.0, "sending_s": 2.0}
    slow = {"name": "relay-1", "stage_index": 1, "by": "computing", "share": 0.9}
    nodes = [
        node("relay-1") | spent | {"device": "NVIDIA H100 (cuda:0)"},
        node("relay-2") | {"computing_s": 1.0, "waiting_s": 9.0, "sending_s": 6.0},
    ]
    audits = {"num_audited": 1, "num_worked": 10, "waited_s": 0.0, "chances": {"1": 0.5}}
    lines = text_of(
        status_answer(
            num_iterations=30,
            age_s=192.0,
            num_tokens=82_000_000,
            left_s=61.0,
            slow=[slow | {"usual_share": 0.25}],
            stages=[{"index": 1, "nodes": nodes}],
            audits=audits,
        ),
        capsys,
    ).splitlines()
    assert "iteration 12 of 30" in lines[0]
    assert lines[1] == "running for 3 min 12 s   82.0 M tokens so far   about 1 min 1 s left"
    assert (
        "relay-1 (stage 1) holds the run up: its device computes for 90 % of an iteration, and the"
        " others are usually busy for 25 %"
    ) in " ".join(" ".join(lines).split())
    (header,) = [line for line in lines if line.startswith("STAGE")]
    rows = [line.split() for line in lines[lines.index(header) + 1 :][:2]]
    assert rows[0][-6:] == ["90", "%", "NVIDIA", "H100", "127.0.0.1:7701"] or rows[0][6:11] == [
        *("90", "%", "NVIDIA", "H100", "127.0.0.1:7701")
    ]
    assert rows[1][5:] == ["60", "%", "sending", "-", "127.0.0.1:7701"]
    audited = [number for number, line in enumerate(lines) if line.startswith("audited")]
    assert audited[0] > lines.index(header)


def test_who_fetches_a_state_is_named_and_the_node_itself_does_not_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    candidates = [
        {"id": "c" * 26, "name": "relay-8", "stage_index": 2},
        {"id": "w" * 26, "name": "relay-9", "stage_index": None},
    ]
    lines = text_of(status_answer(candidates=candidates), capsys).splitlines()
    assert "fetching their stage's state: relay-2 (stage 1), relay-8 (stage 2)" in lines
    assert "waiting to enter: relay-9" in lines
    own = {"id": "w" * 26, "name": "relay-9", "state": "joining"}
    text = text_of(status_answer(candidates=candidates, node=own), capsys)
    assert "waiting to enter" not in text
