"""`decod lab plan run`, which is `decod run plan`, with hosts."""

import json
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.exit_codes import ExitCode

RUN = """
name = "small"
[model]
num_hidden_layers = 4
hidden_size = 64
intermediate_size = 128
vocab_size = 256
num_attention_heads = 4
num_key_value_heads = 4
[batch]
sequence_length = 64
microbatch_size = 2
num_microbatches = 8
"""
HOSTS: dict[str, Any] = {
    "work": {"head_s": 0.01},
    "hosts": [
        {"id": "d", "kind": "data"},
        {"id": "s1", "kind": "reliable", "speed": 40},
        {"id": "s2", "kind": "reliable", "computes": False},
        {"id": "c1", "kind": "unreliable", "speed": 80},
        {"id": "c 2", "kind": "unreliable", "tflops": 0.001},
    ],
    "default_link": {"latency_s": 0.001, "bandwidth_bytes_per_s": 125_000_000},
}
NAMES = ["pipeline", "servers", "diloco", "collaborative"]


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def _write(folder: Path, hosts: dict[str, Any]) -> str:
    path = folder / "hosts.json"
    path.write_text(json.dumps(hosts))
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "run", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_all_organisations_are_compared(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = _json(capsys, str(run_path), "--hosts", _write(tmp_path, HOSTS))
    rows = answer["organisations"]
    assert {row["organisation"] for row in rows} == {*NAMES}
    assert answer["best"] == rows[0]["organisation"]
    assert answer["lead"] == pytest.approx(rows[1]["iteration_s"] / rows[0]["iteration_s"])
    assert answer["measured"] is None
    for row in rows:
        parts = ("compute_s", "communication_s", "fill_s", "aggregation_s")
        assert sum(row[part] for part in parts) == pytest.approx(row["iteration_s"])
        assert row["tokens_per_s"] == pytest.approx(8 * 128 / row["iteration_s"])
        started = {line["host"] for line in row["start"]}
        placed = {host["id"] for stage in row["stages"] for host in stage["hosts"]}
        assert started - {"d"} == placed
        assert placed | {*row["idle"]} == {"s1", "s2", "c1", "c 2"}
    formats = {row["variant"] for row in answer["variants"] if row["organisation"] == "diloco"}
    assert {"every 500", "every 100, int8, overlap", "every 1, int4"} <= formats


def test_a_plan_says_what_one_more_host_would_bring(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fast links the devices decide: half of the work goes to a second one like `c1`."""
    relays = [
        {"id": "c1", "kind": "unreliable", "speed": 8},
        {"id": "c2", "kind": "unreliable", "speed": 0.01},
        {"id": "c3", "kind": "unreliable", "speed": 0.01},
    ]
    hosts = HOSTS | {"hosts": [{"id": "d", "kind": "data"}, *relays]}
    arguments = (str(run_path), "--hosts", _write(tmp_path, hosts), "--organisation", "pipeline")
    answer = _json(capsys, *arguments)
    slow, fast = answer["one_more"]
    assert (slow["like"], fast["like"]) == ("c2", "c1"), "the most frequent first"
    assert slow["gain"] < 0.1
    assert fast["gain"] == pytest.approx(1, abs=0.2)
    assert main(["plan", "run", *arguments]) == 0
    assert "one more host like c1: " in capsys.readouterr().out


def test_the_same_seed_gives_the_same_plan(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (str(run_path), "--hosts", _write(tmp_path, HOSTS), "--seed", "7")
    assert _json(capsys, *arguments) == _json(capsys, *arguments)


def test_a_plan_says_how_to_start(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = _write(tmp_path, HOSTS)
    arguments = (str(run_path), "--hosts", hosts, "--stages", "2", "--organisation")
    [row] = _json(capsys, *arguments, "pipeline")["organisations"]
    assert row["settings"]["stages.num_relay_stages"] == 2
    lines = {line["host"]: line["command"] for line in row["start"]}
    assert lines["d"] == "decod leader RUN.toml --name d"
    relays = [lines[host] for host in lines if host != "d"]
    assert {line.split()[4] for line in relays} == {"1", "2"}
    assert "--capacity" in lines["c1"]
    [row] = _json(capsys, *arguments, "servers")["organisations"]
    assert row["settings"]["organisation"] == "servers"
    assert sum("--server" in line["command"] for line in row["start"]) == 2


@pytest.mark.parametrize("name", [None, *NAMES])
def test_people_get_a_table(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    chosen = [] if name is None else ["--organisation", name]
    assert main(["plan", "run", str(run_path), "--hosts", _write(tmp_path, HOSTS), *chosen]) == 0
    text = capsys.readouterr().out
    assert text.index("STAGE") < text.index("expected on these hosts") < text.index("TOKENS/S")
    assert "next: decod run check" not in text, "it says how to start"
    assert "waits for" in text
    assert "how to start it:" in text


def test_without_a_reliable_host_servers_are_left_out(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = [host for host in HOSTS["hosts"] if host["kind"] != "reliable"]
    path = _write(tmp_path, {**HOSTS, "hosts": hosts})
    answer = _json(capsys, str(run_path), "--hosts", path)
    assert answer["left_out"] == {"servers": "there is no reliable host"}
    assert main(["plan", "run", str(run_path), "--hosts", path]) == 0
    assert "servers is left out: there is no reliable host" in capsys.readouterr().out
    assert (
        main(["plan", "run", str(run_path), "--hosts", path, "--organisation", "servers"])
        == ExitCode.CONFIG
    )
    assert "E-CFG-063" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": HOSTS["hosts"][1:]}, "there is no data node"),
        ({"hosts": [HOSTS["hosts"][0], HOSTS["hosts"][2]]}, "no host computes"),
        ({"hosts": [HOSTS["hosts"][0], {**HOSTS["hosts"][1], "memory_bytes": 1}]}, "E-CFG-063"),
        ({"default_link": None}, "has no link"),
        ({"work": {"layers": 0}}, "work.layers"),
        ({"work": {"speed": 1}}, "work.speed"),
    ],
)
def test_bad_input_is_refused_with_its_place(
    run_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    said: str,
) -> None:
    path = _write(tmp_path, HOSTS | change)
    assert main(["plan", "run", str(run_path), "--hosts", path]) == ExitCode.CONFIG
    assert said in capsys.readouterr().err


def test_hosts_come_from_a_file_or_from_a_run(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path, HOSTS)
    assert main(["plan", "run", str(run_path)]) == 0
    assert "STAGE" in capsys.readouterr().out, "without hosts, the stages are shown"
    for option in (["--stages", "2"], ["--organisation", "diloco"], ["--plot", "x.svg"]):
        assert main(["plan", "run", str(run_path), *option]) == 2, "they are about hosts"
    assert main(["plan", "run", str(run_path), "--hosts", path, "--running", str(tmp_path)]) == 2
    assert main(["plan", "run", str(run_path), "--hosts", path, "--reliable", "c1"]) == 2
    assert main(["plan", "run", str(run_path), "--running", str(tmp_path)]) == 7
    assert "no daemon answers" in capsys.readouterr().err


def test_a_running_leader_is_asked(
    run_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [host for host in HOSTS["hosts"] if host["id"] != "s2"]
    answer = {
        "hosts": {**HOSTS, "hosts": [{**h, "kind": h["kind"].replace("reliable", "unreliable")
                                      .replace("ununre", "unre")} for h in hosts], "links": []},
        "num_links": 12,
        "num_links_measured": 5,
        "speeds_unknown": ["c1"],
    }  # fmt: skip
    asked: list[dict[str, Any]] = []

    def ask(_: Path, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert timeout_s > 0
        asked.append(request)
        return json.loads(json.dumps(answer))  # type: ignore[no-any-return]

    monkeypatch.setattr("decod.daemon.control.ask", ask)
    arguments = (str(run_path), "--running", str(tmp_path))
    told = _json(capsys, *arguments)
    assert asked == [{"command": "plan"}]
    assert told["measured"]["num_links_measured"] == 5
    assert "servers" in told["left_out"]
    told = _json(capsys, *arguments, "--reliable", "s1")
    assert not told["left_out"]
    assert main(["plan", "run", *arguments, "--reliable", "nobody"]) == ExitCode.CONFIG
    assert "the run has no relay of that name" in capsys.readouterr().err
    assert main(["plan", "run", *arguments]) == 0
    assert "5 of 12 links were measured; the other 7 count" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "suffix"), [("pipeline", "png"), ("servers", "svg"), ("collaborative", "png")]
)
def test_a_plan_is_drawn(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    arguments = (str(run_path), "--hosts", _write(tmp_path, HOSTS), "--organisation", name)
    _json(capsys, *arguments, "--plot", str(path))
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head
    assert (
        main(["plan", "run", *arguments, "--plot", str(tmp_path / "plan.gif")]) == ExitCode.CONFIG
    )
