"""`decod service`: the unit that it writes, and what it has systemd do (a stand-in, here)."""

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest

from decod.cli import service_command as module
from decod.cli import service_manager
from decod.cli.main import main
from decod.cli.service_unit import Service, quote, render_unit
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support.fake_daemon import FakeDaemon

JOIN = str(
    JoinString(root=bytes(32), addresses=("127.0.0.1:7700",), token=Token(Role.RELAY, bytes(20)))
)
ME = pwd.getpwuid(os.geteuid()).pw_name


def service(*arguments: str, user: str | None = None, **changes: object) -> Service:
    given: dict[str, object] = {
        "unit": "decod-1",
        "arguments": arguments,
        "python": "/opt/decod/bin/python",
        "folder": Path("/srv/50% of it"),
        "state_dir": Path("/srv/state of it"),
        "user": user,
        "drain_timeout_s": 60.0,
    }
    return Service(**(given | changes))  # type: ignore[arg-type]


def lines_of(service: Service, *, systemd_version: int = 252) -> list[str]:
    return render_unit(service, systemd_version=systemd_version).splitlines()


# --- the unit -------------------------------------------------------------------------------------


def test_both_kinds_of_units_come_from_one_template() -> None:
    own, system = lines_of(service("join")), lines_of(service("join", user="ann"))
    for line in ("Type=notify", "Restart=on-failure", "KillMode=mixed", "WatchdogSec=180"):
        assert line in own
        assert line in system
    assert "WantedBy=default.target" in own
    assert "WantedBy=multi-user.target" in system
    assert "After=network-online.target" in system
    assert "User=ann" in system
    assert not [line for line in own if line.startswith(("User=", "Protect", "NoNew", "Restrict"))]


def test_a_unit_starts_again_what_may_pass_and_nothing_that_takes_a_person() -> None:
    (line,) = [x for x in lines_of(service("join")) if x.startswith("RestartPreventExitStatus=")]
    codes = set(map(int, line.partition("=")[2].split()))
    assert codes >= {2, 3, 5}
    assert not codes & {1, 4, 6, 75}
    old, new = lines_of(service("join")), lines_of(service("join"), systemd_version=254)
    assert "RestartSec=20" in old
    assert not any(line.startswith("RestartMaxDelaySec") for line in old)
    assert "RestartMaxDelaySec=300" in new


def test_a_leader_is_given_time_to_keep_its_model() -> None:
    assert "TimeoutStopSec=90" in lines_of(service("join"))
    assert "TimeoutStopSec=660" in lines_of(service("leader"))


def test_nothing_that_breaks_cuda_is_confined() -> None:
    lines = lines_of(service("join", user="ann", uses_cuda=True))
    names = {line.partition("=")[0] for line in lines if not line.startswith("#")}
    assert {"NoNewPrivileges", "ProtectSystem", "RestrictAddressFamilies"} <= names
    breaking = {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert not names & (breaking | {"MemoryDenyWriteExecute", "SystemCallFilter"})
    assert "ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u" in lines
    assert "ExecStartPre" not in {x.partition("=")[0] for x in lines_of(service("join", user="a"))}


def test_a_unit_may_write_where_its_node_writes_and_nowhere_else() -> None:
    chosen = lines_of(service("leader", user="ann", writable=[Path("/srv/models")]))
    assert 'ReadWritePaths=/srv/models "/srv/state of it"' in chosen
    assert "PrivateTmp=yes" in chosen
    usual = lines_of(service("join", user="ann", state_dir=Path("/var/lib/decod-1")))
    assert "StateDirectory=decod-1" in usual
    assert not [line for line in usual if line.startswith("ReadWritePaths")]
    passing = lines_of(service("join", user="ann", state_dir=Path("/tmp/x")))
    assert "ReadWritePaths=/tmp/x /tmp /var/tmp" in passing
    assert "PrivateTmp=yes" not in passing
    assert "PrivateTmp=yes" not in lines_of(service("join", user="a", python="/tmp/v/bin/python"))


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        ("/usr/bin/python3.11", "/usr/bin/python3.11"),
        ("0.0.0.0:7700", "0.0.0.0:7700"),
        ("[::1]:7700", '"[::1]:7700"'),
        ("a b", '"a b"'),
        ("50%", "50%%"),
        ('say "hi"', '"say \\"hi\\""'),
        ("$HOME", '"$$HOME"'),
        ("a\\b", '"a\\\\b"'),
        ("", '""'),
        (";", '";"'),
    ],
)
def test_arguments_are_quoted_as_systemd_reads_them(argument: str, word: str) -> None:
    assert quote(argument) == word


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("kind", ["join", "leader"])
@pytest.mark.parametrize("user", [None, "root"])
def test_systemd_finds_no_fault_with_a_unit(tmp_path: Path, kind: str, user: str | None) -> None:
    planned = service(kind, "--name", 'a "b" %n $x', user=user, python="/bin/true", uses_cuda=True)
    path = tmp_path / "decod-1.service"
    path.write_text(render_unit(planned, systemd_version=252), encoding="utf-8")
    command = ["systemd-analyze", "verify", *(["--user"] if user is None else []), str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert "decod-1" not in result.stderr, result.stderr
    assert result.returncode == 0 or user is None


# --- what it is given -----------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with a stand-in for systemd, which writes down what it is told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("systemctl", "loginctl", "journalctl"):
        script = programs / name
        said = "systemd 255 (255.1)"
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\necho "{said}"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr(service_manager, "_BOOTED", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls(host: Path) -> list[str]:
    lines = (host / "calls").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "--version" not in line]


def start_of(text: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    return line


def test_a_node_of_a_user_is_installed_started_and_removed(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (host / "join.txt").write_text(JOIN, encoding="utf-8")
    given = ["--join-file", "join.txt", "--listen", "0.0.0.0:7701", "--no-rejoin", "--stage", "2"]
    assert main(["service", "install", "--user", "--unit", "gpu-1", "join", *given]) == 0
    unit = host / "config/systemd/user/gpu-1.service"
    secret = host / "config/decod/gpu-1.join"
    text = unit.read_text(encoding="utf-8")
    command = start_of(text)
    assert JOIN not in text
    assert secret.read_text(encoding="utf-8") == f"{JOIN}\n"
    assert secret.stat().st_mode & 0o777 == 0o600
    for words in (
        " -m decod join ",
        "--listen 0.0.0.0:7701",
        "--no-rejoin",
        "--stage 2",
        f"--join-file {secret}",
        f"--state-dir {host / 'state/decod'}",
    ):
        assert words in command, command
    assert command.count("--join-file") == 1
    assert f"WorkingDirectory={host}" in text
    assert "RestartMaxDelaySec=300" in text, "this systemd can do that"
    own = "systemctl --user --no-ask-password"
    assert calls(host) == [
        f"{own} daemon-reload",
        f"{own} enable gpu-1.service",
        f"loginctl --no-ask-password enable-linger {ME}",
        f"{own} restart gpu-1.service",
    ]
    for verb in ("start", "stop", "uninstall"):
        assert main(["service", verb, "--user", "--unit", "gpu-1"]) == 0
    assert calls(host)[-4:] == [
        f"{own} start gpu-1.service",
        f"{own} stop gpu-1.service",
        f"{own} disable --now gpu-1.service",
        f"{own} daemon-reload",
    ]
    assert not unit.exists()
    assert not secret.exists()
    assert "state folder, with its identity" in capsys.readouterr().out


def test_a_leader_goes_on_by_itself_and_a_further_data_node_joins(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "init", "run.toml"]) == 0
    shown = ["service", "install", "--user", "--print", "leader", "run.toml"]
    for more, expected in (
        ([], "leader run.toml --resume auto --state-dir"),
        (["--resume", "7"], "leader run.toml --resume 7 --state-dir"),
        (["--join", JOIN], f"leader run.toml --join-file {host}/config/decod/decod.join"),
    ):
        capsys.readouterr()
        assert main([*shown, *more]) == 0
        text = capsys.readouterr().out
        assert f"decod {expected}" in start_of(text)
        assert JOIN not in text
    assert not (host / "config").exists(), "it is only printed"


def test_a_service_that_would_begin_a_run_at_every_start_is_told(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "init", "run.toml"]) == 0
    shown = ["service", "install", "--user", "--print", "leader", "run.toml"]
    for more, warns in (([], False), (["--resume", "auto"], False), (["--resume", "latest"], True)):
        capsys.readouterr()
        assert main([*shown, *more]) == 0
        assert (
            "every start of the service begins a second run" in capsys.readouterr().err
        ) == warns
    assert main([*shown, "--new-run"]) == 2
    assert "--new-run would begin another run at every start" in capsys.readouterr().err
    assert not (host / "config").exists(), "it is only printed"


def test_a_node_of_the_machine_runs_as_somebody(
    host: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = ["service", "install", "--system", "--print"]
    assert main([*shown, "join", JOIN]) == 3
    assert "E-CFG-072 nobody is named" in capsys.readouterr().err
    assert main([*shown, "--run-as", "no-such-user", "join", JOIN]) == 3
    assert "no-such-user" in capsys.readouterr().err
    monkeypatch.setenv("SUDO_USER", "daemon")
    assert main([*shown, "join", JOIN]) == 0
    text = capsys.readouterr().out
    assert "User=daemon\n" in text
    assert "--join-file /etc/decod/decod.join --state-dir /var/lib/decod\n" in text
    assert main(["run", "init", "run.toml"]) == 0
    capsys.readouterr()
    written = ["--export", "/srv/models/mine", "--write-join", "/srv/run/join"]
    assert main([*shown, "leader", "run.toml", *written]) == 0
    assert "ReadWritePaths=/srv/models /srv/run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "loads"),
    [
        ([], True),
        (["--device", "auto"], True),
        (["--device", "cuda:1"], True),
        (["--device", "cpu"], False),
    ],
)
def test_the_driver_is_loaded_for_every_node_that_may_use_cuda(
    host: Path, given: list[str], loads: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Confined, it can't do that itself, and a trial of CUDA would fail for that alone."""
    shown = ["service", "install", "--system", "--print", "--run-as", "daemon"]
    assert main([*shown, "join", JOIN, *given]) == 0
    text = capsys.readouterr().out
    assert ("nvidia-modprobe" in text) == loads
    assert ("--device" in start_of(text)) == bool(given)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], 2),
        (["demo"], 2),
        (["join"], 2),
        (["join", JOIN, "--stage", "0"], 2),
        (["join", JOIN, "--device", "tpu"], 3),
        (["join", JOIN[:-30]], 4),
        (["join", "--join-file", "none.txt"], 3),
        (["leader"], 3),
        (["leader", "none.toml"], 3),
    ],
)
def test_what_no_node_would_accept_is_not_installed(
    host: Path, arguments: list[str], code: int
) -> None:
    assert main(["service", "install", "--user", *arguments]) == code
    assert not (host / "calls").exists()
    assert not (host / "config").exists()


def test_what_systemd_refuses_is_told(
    host: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = host / "bin/systemctl"
    script.write_text('#!/bin/sh\necho "no bus\nhere" >&2; exit 1\n')
    assert main(["service", "install", "--user", "join", JOIN]) == 1
    error = capsys.readouterr().err
    assert "E-RUN-030 systemctl daemon-reload failed: no bus here" in error


def test_without_systemd_nothing_is_installed_and_what_was_can_be_removed(
    host: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["service", "install", "--user", "join", JOIN]) == 0
    monkeypatch.setattr(service_manager, "_BOOTED", host / "none")
    assert main(["service", "install", "--user", "--unit", "other", "join", JOIN]) == 3
    assert "E-CFG-071 no systemd runs this machine" in capsys.readouterr().err
    assert not list((host / "config").rglob("other*"))
    assert main(["service", "uninstall", "--user"]) == 0
    assert not [path for path in (host / "config").rglob("*") if path.is_file()]


def test_a_service_that_is_not_installed_is_named(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in ("start", "stop", "uninstall", "logs", "status"):
        assert main(["service", verb, "--user", "--unit", "other"]) == 3
        assert "E-CFG-074 this user has no service other" in capsys.readouterr().err
    assert main(["service", "start", "--unit", "../x"]) == 2


def test_the_log_is_that_of_the_unit(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(module.os, "execv", lambda _, command: seen.append(command[1:]))
    unit = host / "config/systemd/user/decod.service"
    unit.parent.mkdir(parents=True)
    unit.touch()
    main(["service", "logs", "--user"])
    main(["service", "logs", "--user", "-f", "-n", "5"])
    assert seen == [
        ["--user", "-u", "decod.service", "-n", "100", "--no-pager"],
        ["--user", "-u", "decod.service", "-n", "5", "--follow"],
    ]


SHOWN = "ActiveState=%s\\nSubState=%s\\nResult=%s\\nUnitFileState=enabled\\nX"


def test_the_status_is_that_of_the_service_and_of_its_node(
    host: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (host / "join.txt").write_text(JOIN, encoding="utf-8")
    state = host / "a state"
    given = ["--join-file", "join.txt", "--state-dir", str(state)]
    assert main(["service", "install", "--user", "join", *given]) == 0
    assert main(["service", "status", "--user"]) == 7
    assert "decod: unknown (?)" in capsys.readouterr().out, "the stand-in tells no state"

    def tell(*words: str) -> None:
        script = host / "bin/systemctl"
        script.write_text(
            f'#!/bin/sh\necho "systemctl $*" >> {host}/calls\nprintf "{SHOWN % words}"\n'
        )

    tell("failed", "failed", "exit-code")
    assert main(["service", "status", "--user"]) == 7
    said = capsys.readouterr().out
    assert "decod: failed (failed)" in said
    assert "starts with the machine: enabled" in said
    assert "it does not run, since it ended with exit-code; see decod service logs" in said
    tell("active", "running", "success")
    assert main(["service", "status", "--user"]) == 0
    assert "its node does not answer yet" in capsys.readouterr().out
    state.mkdir(exist_ok=True)
    daemon = FakeDaemon(state)
    try:
        assert main(["service", "status", "--user"]) == 0
    finally:
        daemon.close()
    said = capsys.readouterr().out
    assert "decod: active (running)" in said
    assert "run wiki" in said
    assert calls(host)[-1].startswith("systemctl --user --no-ask-password show decod.service")
