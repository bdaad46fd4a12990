"""`decod run plan`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decod.cli.main import main
from decod.config.needs import stage_needs
from decod.config.run_file import load_run_file
from decod.exit_codes import ExitCode
from decod.run.stages_config import StagesConfig
from tests.unit.lab.cli.test_plan_run import HOSTS, RUN

DILOCO = '[sync]\nmethod = "diloco"\nevery = 20\noverlap = true\ncompression = "int4"\n'


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def hosts_path(tmp_path: Path) -> str:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(HOSTS))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main(["run", "plan", *map(str, arguments), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return answer


def test_each_stage_has_its_needs(run_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, run = planned(capsys, run_path), load_run_file(run_path).run
    assert answer["forecast"] is None, "nobody has named hosts"
    assert sum(stage["num_layers"] for stage in answer["stages"]) == 4
    for index, stage in enumerate(answer["stages"]):
        needs = stage_needs(run, index)
        assert stage["stage"] == index
        assert stage["num_parameters"] == needs.num_parameters
        sizes = ("weights_bytes", "optimizer_bytes", "loss_bytes")
        assert sum(stage[size] for size in sizes) == needs.device_bytes
        assert bool(stage["loss_bytes"]) == (index == 0)
        assert stage["microbatch_bytes"] == needs.microbatch_bytes
        assert stage["input_bytes"] == needs.input_bytes
        assert stage["memory_min_bytes"] == needs.device_bytes + needs.microbatch_bytes
        assert stage["download_bytes"] == needs.state_bytes
    assert answer["num_parameters"] == sum(each["num_parameters"] for each in answer["stages"])


def test_fewer_volunteers_are_enough_with_larger_cards(
    run_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large.toml"
    assert main(["run", "init", str(large), "--preset", "llama-8b"]) == 0
    text = large.read_text().replace('kind = "none"', 'kind = "lora"')
    large.write_text(text.replace('base = "model"', 'base = "nf4"'))
    run = load_run_file(large).run
    capsys.readouterr()
    cards = planned(capsys, large)["cards"]
    assert [each["num_volunteers"] for each in cards] == sorted(
        {each["num_volunteers"] for each in cards}, reverse=True
    )
    assert cards[-1]["num_volunteers"] == 1
    for each in cards:
        num = each["num_volunteers"]
        cut = replace(run, stages=StagesConfig(num_relay_stages=num))
        most = max(stage_needs(cut, index + 1).memory_min_bytes for index in range(num))
        assert most <= (each["memory_gib"] - 1) << 30
    assert main(["run", "plan", str(large)]) == 0
    said = capsys.readouterr().out
    assert f"or 1 volunteer with {cards[-1]['memory_gib']} GiB" in said
    assert planned(capsys, run_path)["cards"] == [{"num_volunteers": 1, "memory_gib": 4}]


def test_several_devices_have_a_second_way(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = planned(capsys, run_path)
    assert {stage["spread_min_bytes"] for stage in one["stages"]} == {None}
    answer, run = planned(capsys, run_path, "--devices", 2), load_run_file(run_path).run
    for index, stage in enumerate(answer["stages"]):
        copied, spread = (stage_needs(run, index, 2, sharded=each) for each in (False, True))
        assert stage["microbatch_bytes"] == copied.microbatch_bytes
        assert stage["memory_min_bytes"] == copied.device_bytes + copied.microbatch_bytes
        assert stage["spread_min_bytes"] == spread.device_bytes + spread.microbatch_bytes
        assert stage["spread_host_bytes"] == spread.host_bytes > 0
    assert main(["run", "plan", str(run_path), "--devices", "2"]) == 0
    said = capsys.readouterr().out
    assert "SPREAD" in said
    assert "HOST" in said
    assert main(["run", "plan", str(run_path), "--devices", "64"]) == ExitCode.CONFIG
    assert "E-CFG-021 64 devices for microbatches of" in capsys.readouterr().err


def test_the_table_shows_them_and_says_what_is_next(
    run_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "plan", str(run_path)]) == 0
    said = capsys.readouterr().out
    assert "0 data  embedding, head" in said
    for column in ("PARAMETERS", "WEIGHTS", "OPTIMIZER", "LOSS", "MICROBATCH", "INPUT", "MEMORY"):
        assert column in said
    assert "DOWNLOAD" in said
    assert "expected on these hosts" not in said
    last = said.splitlines()[-1]
    assert last == f"next: decod run check {run_path}, then decod leader {run_path}"


def test_hosts_give_the_time_of_the_run_files_own_organisation(
    run_path: Path, hosts_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forecast = planned(capsys, run_path, "--hosts", hosts_path)["forecast"]
    assert (forecast["organisation"], forecast["differs"]) == ("pipeline", [])
    assert forecast["tokens_per_s"] == pytest.approx(8 * 128 / forecast["iteration_s"])
    assert len(forecast["stages"]) == load_run_file(run_path).run.stages.num_relay_stages
    assert main(["run", "plan", str(run_path), "--hosts", hosts_path]) == 0
    said = capsys.readouterr().out
    assert f"an iteration in {forecast['iteration_s']:.3g} s" in said
    assert "unlike the run file" not in said


def test_the_forecast_is_that_of_the_run_files_settings(
    run_path: Path, hosts_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_path.write_text(RUN + DILOCO)
    forecast = planned(capsys, run_path, "--hosts", hosts_path)["forecast"]
    assert forecast["organisation"] == "diloco"
    assert forecast["variant"] == "every 20, int4, overlap"
    assert forecast["differs"] == []


def test_what_the_forecast_cannot_follow_is_said(
    run_path: Path, hosts_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No plan counts float16, and the file has one data node."""
    run_path.write_text(RUN + "num_data_nodes = 2\n" + DILOCO.replace("int4", "fp16"))
    assert main(["run", "plan", str(run_path), "--hosts", hosts_path]) == 0
    said = capsys.readouterr().out
    assert "unlike the run file, it takes sync.compression = " in said
    assert "batch.num_data_nodes = 1" in said


@pytest.mark.parametrize(
    ("run", "hosts", "holds"),
    [
        ("[model]\nhiden_size = 3", None, "run.toml:2: unknown key model.hiden_size"),
        (None, "{", "E-CFG-051"),
        (None, '{"hosts": []}', "there is no data node"),
        (None, json.dumps(HOSTS | {"hosts": [{"id": "d", "kind": "data"}]}), "no host computes"),
    ],
)
def test_bad_input_is_one_error(
    run: str | None,
    hosts: str | None,
    holds: str,
    run_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if run is not None:
        run_path.write_text(run)
    arguments = ["run", "plan", str(run_path)]
    if hosts is not None:
        (tmp_path / "hosts.json").write_text(hosts)
        arguments += ["--hosts", str(tmp_path / "hosts.json")]
    assert main(arguments) == ExitCode.CONFIG
    said = capsys.readouterr()
    assert said.out == ""
    assert holds in said.err
    assert len(said.err.splitlines()) == 1
