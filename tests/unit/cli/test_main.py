"""The command line's frame: exit codes, one line per error, nothing imported needlessly."""

import errno
import importlib
import json
import math
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import decod.cli
from decod import __version__
from decod.cli import printing as output
from decod.cli.main import COMMANDS, EVERYDAY, SECTIONS, cli, main
from decod.cli.node_options import state_dir_option
from decod.cli.printing import json_text
from decod.daemon.node_folder import StateFolder
from decod.errors import ConfigError, DecodError, HardwareError, NotRunningError
from decod.exit_codes import ExitCode
from decod.process import LEAVE_SIGNALS


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[BaseException | int]:
    """A command `demo` that raises what is put in the list, or ends with that number."""
    box: list[BaseException | int] = []

    @click.command()
    @state_dir_option
    @click.pass_context
    def demo(ctx: click.Context, state_dir: Path) -> None:
        outcome = box.pop()
        if isinstance(outcome, BaseException):
            raise outcome
        ctx.exit(outcome)

    monkeypatch.setattr(cli, "get_command", lambda ctx, name: demo)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return box


def test_no_arguments_give_the_help_and_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 2
    assert "decod join JOINSTRING" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["run", "nonsense"]])
def test_unknown_words_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "nonsense" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"decod {__version__}\n"


def listed(text: str) -> list[str]:
    """Return the commands of a help's sections, in their order."""
    found = list[str]()
    for title in SECTIONS:
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        found += [line.split()[0] for line in section.splitlines()]
    return found


def test_help_lists_what_most_people_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EVERYDAY) == 12
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert sorted(listed(text)) == sorted(EVERYDAY)
    assert f"All {len(COMMANDS)} commands: decod --help-all" in text


def test_the_whole_help_has_each_command_in_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(map(len, SECTIONS.values())) == len(COMMANDS), "a command is in two sections"
    assert main(["--help-all"]) == 0
    assert listed(capsys.readouterr().out) == list(COMMANDS)


def test_no_command_is_forgotten_in_the_help() -> None:
    """Each command of a module is listed, unless it is below another one or hidden."""
    found = set()
    for module in pkgutil.iter_modules(decod.cli.__path__):
        if not module.name.endswith("_command"):
            continue
        commands = {
            name: value
            for name, value in vars(importlib.import_module(f"decod.cli.{module.name}")).items()
            if isinstance(value, click.Command) and not value.hidden
        }
        groups = [each for each in commands.values() if isinstance(each, click.Group)]
        below = {id(child) for group in groups for child in group.commands.values()}
        found |= {name for name, command in commands.items() if id(command) not in below}
    assert found | {"lab"} == set(COMMANDS)


@pytest.mark.parametrize("cls", [ConfigError, HardwareError, NotRunningError])
def test_an_error_of_ours_is_one_line_and_its_exit_code(
    cls: type[DecodError], failing: list[BaseException | int], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(cls("this\x1b[31m", why="so\nit is", fix="that"))
    assert main(["demo"]) == cls.exit_code
    assert capsys.readouterr().err == f"error: {cls.code} this?[31m: so it is. Try: that\n"


def test_an_error_of_ours_is_found_in_a_group_of_failed_tasks(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = NotRunningError("nobody", why="asleep", fix="knock")
    failing.append(ExceptionGroup("tasks", [ExceptionGroup("inner", [ValueError("x"), ours])]))
    assert main(["demo"]) == 7
    assert capsys.readouterr().err == "error: E-RUN-001 nobody: asleep. Try: knock\n"


def test_an_unexpected_error_is_one_line_and_a_report_in_a_file(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing.append(ZeroDivisionError("oh"))
    assert main(["demo"]) == 1
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "E-INT-001 ZeroDivisionError: oh" in text
    (report,) = (tmp_path / "decod").glob("crash-*.txt")
    assert str(report) in text
    assert "Traceback" in report.read_text()


def test_a_nodes_report_is_in_its_own_folder(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing.append(ZeroDivisionError("oh"))
    assert main(["demo", "--state-dir", str(tmp_path / "own")]) == 1
    (report,) = (tmp_path / "own").glob("crash-*.txt")
    assert str(report) in capsys.readouterr().err


def test_an_unexpected_error_on_a_full_disk_is_still_one_line(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "cache").touch()
    failing.append(ZeroDivisionError("oh"))
    assert main(["demo", "--state-dir", str(tmp_path / "file" / "decod")]) == 1
    assert "no file could be written" in capsys.readouterr().err


def test_an_error_on_a_terminal_that_is_gone_keeps_its_exit_code(
    failing: list[BaseException | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_: str) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys.stderr, "write", write)
    failing.append(HardwareError("a", why="b", fix="c"))
    assert main(["demo"]) == 6


def test_a_disk_that_fails_is_no_bug(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    failing.append(OSError(errno.EIO, "Input/output error", "/some/file"))
    assert main(["demo"]) == 6
    text = capsys.readouterr().err
    (report,) = (tmp_path / "decod").glob("crash-*.txt")
    assert text.startswith("error: E-HW-012 /some/file: Input/output error: ")
    assert str(report) in text
    assert "bug" not in text


def test_the_report_of_a_command_is_not_put_among_a_running_nodes_files(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Who finds one there takes it for the node's."""
    folder = StateFolder(tmp_path / "own")
    folder.lock()
    failing.append(ZeroDivisionError("oh"))
    assert main(["demo", "--state-dir", str(tmp_path / "own")]) == 1
    assert not [*(tmp_path / "own").glob("crash-*")]
    (report,) = (tmp_path / "cache" / "decod").glob("crash-*.txt")
    assert str(report) in capsys.readouterr().err
    folder.unlock()
    failing.append(ZeroDivisionError("oh"))
    assert main(["demo", "--state-dir", str(tmp_path / "own")]) == 1
    assert [*(tmp_path / "own").glob("crash-*")]


def test_ctrl_c_ends_with_130(
    failing: list[BaseException | int], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(KeyboardInterrupt())
    assert main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_ctrl_c_ends_with_130_while_the_command_line_is_imported() -> None:
    """Nothing that takes time is imported before that is seen to."""
    code = """if True:
        import sys
        from decod.__main__ import run
        assert not {"click", "asyncio", "decod.cli"} & set(sys.modules), sorted(sys.modules)
        class Interrupted:
            def find_spec(self, name, path, target=None):
                if name == "click":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        sys.exit(run())
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stderr) == (130, b"interrupted\n")


@pytest.mark.parametrize("command", ["leader", "join"])
@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_a_node_leaves_in_order_while_the_command_line_is_imported(
    command: str, number: signal.Signals
) -> None:
    code = f"""if True:
        import os, signal, sys
        signal.signal({int(number)}, signal.SIG_DFL)  # A test before this one may have ignored it.
        from decod.__main__ import run
        class Asked:
            def find_spec(self, name, path, target=None):
                if name == "click":
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Asked())
        sys.argv = ["decod", "{command}", "--help"]
        sys.exit(run())
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr == b"left before anything had begun\n"


def test_a_command_can_choose_its_exit_code(failing: list[BaseException | int]) -> None:
    failing.append(ExitCode.DEGRADED)
    assert main(["demo"]) == 8


def test_a_command_that_ends_well_gives_zero(failing: list[BaseException | int]) -> None:
    failing.append(0)
    assert main(["demo"]) == 0


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"PYTHONIOENCODING": "ascii"}])
def test_output_suits_the_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "decod", "run", "check", "no-such-é.toml"],
        capture_output=True,
        env={"PATH": "", **environment},
        check=False,
    )
    assert result.returncode == 3
    assert result.stderr.startswith(b"error: E-CFG-002")
    assert b"Traceback" not in result.stderr


def test_the_frame_imports_neither_torch_nor_grpc() -> None:
    """`decod status` and `decod --help` have to answer at once."""
    code = (
        "import sys; from decod.cli.main import main; main(['--help']); "
        "sys.exit(bool({'torch', 'grpc', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode
        == 0
    )


def test_output_that_promises_json_is_json() -> None:
    """Python writes `NaN` and `Infinity`, which no other parser reads."""
    values = {"loss": math.nan, "rates": (1.5, math.inf), "inner": [{"x": -math.inf}], "n": 3}
    text = json_text(values)
    assert json.loads(text) == {"loss": None, "rates": [1.5, None], "inner": [{"x": None}], "n": 3}
    sources = {path.name: path.read_text() for path in Path(output.__file__).parent.glob("*.py")}
    assert not [name for name, text in sources.items() if "click.echo(json.dumps(" in text]
