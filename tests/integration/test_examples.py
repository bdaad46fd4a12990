"""The examples train together: each runs in two processes, as in two terminals."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.polling import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
_START_S = 90.0
"""Frameworks take half a minute to import while the machine is busy."""


def require(*modules: str) -> None:
    """Skip where an example's framework is not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[examples]'")


@contextmanager
def running(
    script: str, folder: Path, name: str, *options: str
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Run an example; give its process and what it writes."""
    output = folder / f"{name}.txt"
    environment = os.environ | {
        "XDG_STATE_HOME": str(folder / "state"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            (sys.executable, str(ROOT / "examples" / script), *options),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield process, output
    finally:
        process.kill()
        process.wait()


def train_together(script: str, folder: Path, num_steps: int) -> str:
    """Run an example at two hosts; return what the second has written."""
    with running(script, folder, "first", "--steps", "1000000") as (first, first_output):

        def join_string() -> str | None:
            found = re.search(r"^join string: (\S+)$", first_output.read_text(), re.MULTILINE)
            assert found or first.poll() is None, first_output.read_text()
            return found[1] if found else None

        told = wait_for(join_string, what="the join string", timeout_s=_START_S)
        assert told is not None
        options = ("--join", told, "--steps", str(num_steps))
        with running(script, folder, "second", *options) as (second, second_output):
            code = second.wait(_START_S + 60.0)
            text = second_output.read_text()
            assert code == 0, text
        before = first_output.read_text().count("\nround ")
        wait_for(
            lambda: first_output.read_text().count("\nround ") > before + 1,
            what="a round of the first host alone",
            timeout_s=60.0,
        )
        first.send_signal(signal.SIGINT)
        first.wait(60.0)
    assert "Traceback" not in first_output.read_text()
    return text


def check(text: str, *, samples_min: int) -> None:
    """The second host has taken part, and the model has learnt."""
    rounds = re.findall(r"^round (\d+): loss ([\d.]+), (\d+) hosts$", text, re.MULTILINE)
    assert "2" in {hosts for _, _, hosts in rounds}, text
    last, contributed = float(rounds[-1][1]), re.search(r"^contributed (\d+) samples", text, re.M)
    assert contributed is not None
    assert int(contributed[1]) >= samples_min, text
    assert last < 1.5, text  # All begin at 2.3 or 4.2.


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    text = train_together("plain_loop.py", tmp_path, 150)
    check(text, samples_min=3000)


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    require("transformers", "accelerate")
    text = train_together("huggingface_trainer.py", tmp_path, 400)
    check(text, samples_min=2000)


def test_lightning(tmp_path: Path) -> None:
    require("lightning")
    text = train_together("lightning_module.py", tmp_path, 150)
    check(text, samples_min=3000)
