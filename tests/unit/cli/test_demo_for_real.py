"""The demo with real daemons: what a newcomer sees first has to work."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_five_daemons_learn_though_one_is_killed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    result = subprocess.run(
        [sys.executable, "-m", "decod", "demo", "--iterations", "40", "--model-dir", str(model)],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"killing relay-[1-4] \(process \d+\) with SIGKILL", result.stdout)
    assert "training goes on without relay-" in result.stdout
    assert "sample (prompt 'def '):\ndef " in result.stdout
    assert f"model: {model}" in result.stdout
    assert {path.name for path in model.iterdir()} >= {"config.json", "model.safetensors"}
