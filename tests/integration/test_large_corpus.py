"""A corpus has the same bytes when commands and workers are killed, on one host and with Dask."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]


def test_killed_preparations_give_the_bytes_of_an_undisturbed_one(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    pytest.importorskip("pyarrow")
    script = ROOT / "scripts" / "check_large_corpus.py"
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    result = subprocess.run(
        [sys.executable, script, "--megabytes", "200", "--folder", tmp_path],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "all bytes are equal"
