"""`decod doctor`: its command line, its lines, its JSON and its exit code."""

import json
from pathlib import Path

import pytest

from decod.cli.main import main
from decod.config.node_config import DEFAULT_PORT
from decod.exit_codes import ExitCode
from decod.insight.doctor import Patient, Tell
from decod.insight.host_checks import Diagnosis, doubtful, failed, fine
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support.members import ROOT

JOIN = JoinString(root=ROOT.public, addresses=("h:1",), token=Token.new(Role.RELAY))

WELL = fine("dns", "h is 192.0.2.7")
ODD = doubtful("mtu", "576 bytes \x1b[2J", "set another")
BAD = failed("port", "it is in use", "give another", ExitCode.NETWORK)
WORSE = failed("disk", "it is full", "free it", ExitCode.CONFIG)


class FakeExamination:
    """Tells what a test has chosen. Nothing is examined."""

    def __init__(self) -> None:
        self.told: list[Diagnosis] = [WELL]
        self.patients: list[Patient] = []

    async def __call__(self, patient: Patient, tell: Tell) -> None:
        self.patients.append(patient)
        for each in self.told:
            tell(each)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeExamination:
    found = FakeExamination()
    monkeypatch.setattr("decod.insight.doctor.examine", found)
    return found


def test_each_check_is_a_line(fake: FakeExamination, capfd: pytest.CaptureFixture[str]) -> None:
    fake.told = [WELL, ODD]
    assert main(["doctor"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "OK    dns       h is 192.0.2.7",
        "WARN  mtu       576 bytes ?[2J. Try: set another",
    ]


def test_the_first_failure_is_the_exit_code(
    fake: FakeExamination, capfd: pytest.CaptureFixture[str]
) -> None:
    fake.told = [WELL, ODD, BAD, WORSE]
    assert main(["doctor"]) == 4
    assert "FAIL  port      it is in use. Try: give another\n" in capfd.readouterr().out


def test_json_says_the_same(fake: FakeExamination, capfd: pytest.CaptureFixture[str]) -> None:
    fake.told = [WELL, BAD]
    assert main(["doctor", "--json"]) == 4
    found = json.loads(capfd.readouterr().out)
    assert (found["schema_version"], found["exit_code"]) == (1, 4)
    assert found["checks"] == [
        {"check": "dns", "level": "OK", "found": "h is 192.0.2.7", "remedy": None},
        {"check": "port", "level": "FAIL", "found": "it is in use", "remedy": "give another"},
    ]


def test_without_options_it_is_the_node_that_join_would_start(fake: FakeExamination) -> None:
    assert main(["doctor"]) == 0
    (patient,) = fake.patients
    assert patient.join is None
    config = patient.config
    assert (config.listen_host, config.listen_port) == ("0.0.0.0", DEFAULT_PORT)
    assert (config.device, config.advertise) == ("auto", None)


def test_options_and_join_string_arrive(fake: FakeExamination, tmp_path: Path) -> None:
    file = tmp_path / "join.txt"
    file.write_text(f"join string: {JOIN}\n")
    file.chmod(0o600)
    line = ["--listen", "127.0.0.1:7", "--advertise", "h:8", "--device", "cuda:1"]
    place = ["--join-file", str(file), "--state-dir", str(tmp_path / "s")]
    assert main(["doctor", *line, *place]) == 0
    (patient,) = fake.patients
    assert patient.join == JOIN
    config = patient.config
    assert (config.listen_host, config.listen_port, config.advertise) == ("127.0.0.1", 7, "h:8")
    assert (config.device, config.state_dir) == ("cuda:1", tmp_path / "s")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["decod1-v-nonsense"], 4, "E-NET-010"),
        (["--device", "tpu"], 3, "E-CFG-021"),
        (["--join-file", "/nowhere/join.txt"], 3, "E-CFG-"),
    ],
)
def test_bad_input_ends_with_one_line(
    fake: FakeExamination,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    text: str,
) -> None:
    assert main(["doctor", *arguments]) == code
    said = capfd.readouterr()
    assert said.out == ""
    assert text in said.err.splitlines()[-1]
    assert not fake.patients
