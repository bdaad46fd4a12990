"""Slips on the command line, answered by the real command with what to do about them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support.cluster import assert_refused, child_environment, run_decod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("jion", "join"), ("leeder", "leader"), ("statsu", "status"), ("data prepared", "prepare")],
)
def test_a_misspelt_command_is_guessed(typed: str, meant: str) -> None:
    result = run_decod(*typed.split(), fork=False)
    assert result.returncode == 2
    assert f"Did you mean '{meant}'?" in result.stderr


@pytest.mark.parametrize("capacity", ["0", "4097", "5000", "123456789", "1" * 30, "-1", "many"])
def test_a_capacity_that_can_not_be_is_told_its_limits(capacity: str) -> None:
    """The same words, whatever limit it lies beyond."""
    result = run_decod("join", "decod1-x@127.0.0.1:1", "--capacity", capacity)
    assert result.returncode == 2
    assert "is neither auto nor a number from 1 to 4096" in result.stderr


def test_a_run_that_is_not_there_is_told_in_words_for_people(tmp_path: Path) -> None:
    """What gRPC says of it is long, and would be cut."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        join = JoinString(root=bytes(32), addresses=(address,), token=Token.new(Role.RELAY))
        result = run_decod("join", str(join), "--state-dir", tmp_path / "state")
    says = (
        f"nobody answers at {address}, the only address in this join string: nobody listens there"
    )
    assert_refused(result, exit_code=4, holds=[says, "Try: ask the organiser for a newer join"])


@pytest.mark.parametrize(
    ("missing", "arguments", "extra", "hint"),
    [
        (
            "highspy",
            ["plan", "route", "graph.json", "--algorithm", "optimal"],
            "lab",
            "install decod with the extra `lab`",
        ),
        ("pyarrow", ["data", "prepare", "out", "rows.parquet"], "parquet", "[parquet]'`"),
        (
            "matplotlib.figure",
            ["simulate", "--paper", "gwtf-figure5", "--plot", "figure.png"],
            "plot",
            "[plot]'`",
        ),
    ],
)
def test_a_missing_package_is_installed_as_decod_was(
    tmp_path: Path, missing: str, arguments: list[str], extra: str, hint: str
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    graph = {
        "stages": 1,
        "nodes": [
            {"id": "d", "role": "data", "stage": 0, "capacity": 1},
            {"id": "a", "role": "relay", "stage": 1, "capacity": 1},
        ],
        "links": [{"from": "d", "to": "a", "cost": 1}, {"from": "a", "to": "d", "cost": 1}],
    }
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    code = f"import sys; sys.modules[{missing!r}] = None; from decod.cli.main import main; "
    code += f"sys.exit(main({arguments!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(result, exit_code=result.returncode, holds=[hint])
    assert result.returncode in (3, 9)
    extras = (ROOT / "docs/reference.md").read_text()
    assert f"'.[{extra}]'" in extras
