"""What can go wrong with a join string before anybody is asked: each says what to do."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from decod.cli.main import main
from decod.config import secret
from decod.membership.tokens import Token
from decod.net.join_string import JoinString
from decod.protocol.core.view import Role
from tests.support.members import ROOT

TOKEN = Token(Role.RELAY, bytes(range(20)))
TEXT = str(JoinString(root=ROOT.public, addresses=("127.0.0.1:1",), token=TOKEN))
SECRET = TEXT.split("-")[3]
HEAD = TEXT.partition("@")[0]


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    return ["--state-dir", str(tmp_path / "state"), "--listen", "127.0.0.1:0"]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shells of this host's other accounts, besides its own and those of the system."""
    shells: list[str] = []

    def accounts() -> list[SimpleNamespace]:
        listed = [(os.getuid(), "/bin/bash"), (0, "/bin/bash"), (999, "/bin/bash")]
        listed += [(1_500 + k, shell) for k, shell in enumerate(shells)]
        return [
            SimpleNamespace(pw_name=f"user-{uid}", pw_uid=uid, pw_shell=shell, pw_dir="/nowhere")
            for uid, shell in listed
        ]

    monkeypatch.setattr("pwd.getpwall", accounts)
    return shells


def assert_told(said: str, *told: str) -> None:
    """Checks that the output has one error, with a fix, and neither a traceback nor the secret."""
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, said
    for text in ("Try: ", *told):
        assert text in errors[0]
    assert "Traceback" not in said
    assert not [k for k in range(len(SECRET) - 7) if SECRET[k : k + 8] in said.lower()], said


def flipped(text: str, at: int) -> str:
    return text[:at] + ("b" if text[at] == "a" else "a") + text[at + 1 :]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD[:-20], "20 characters missing"),
        (HEAD, "no address in it"),
        (TEXT[2:], "does not begin with decod1-"),
        (flipped(TEXT, 70), "a character was altered"),
        (TEXT[:70] + TEXT[71] + TEXT[70] + TEXT[72:], "a character was altered"),
        (f"{TEXT} {TEXT}", "there are 2 of them"),
        (f"{HEAD}@127.0.0.1", "it must be host:port"),
        (f"{HEAD}@::1:7700", "an IPv6 host in brackets"),
        (f"{HEAD}@h:77000", "a port from 1 to 65535"),
        (f"{TEXT} relay-1", "it must be host:port"),
        ("xyz", "does not begin with decod1-"),
        ("", "it is empty"),
    ],
)
def test_a_line_that_is_damaged_says_how(
    text: str, told: str, place: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", text, *place]) == 4
    assert_told(capfd.readouterr().err, told)
    assert not (tmp_path / "state").exists(), "nothing was begun"


def test_a_data_node_hears_of_a_damaged_line_before_anything_is_read(
    place: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_file = str(tmp_path / "run.toml")
    assert main(["run", "init", run_file]) == 0
    assert main(["leader", run_file, "--join", HEAD[:-20], *place]) == 4
    assert_told(capfd.readouterr().err, "20 characters missing")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("missing", "No such file or directory"),
        ("empty", "it is empty"),
        ("blank", "it is empty"),
        ("folder", "no ordinary file"),
        ("huge", "more than 10,000 bytes"),
        ("random", "not UTF-8 text"),
        ("zeros", "not UTF-8 text"),
        ("utf-16", "not UTF-8 text"),
    ],
)
def test_a_file_without_a_join_string_is_named(
    kind: str, told: str, place: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "join.txt"
    contents = {
        "empty": b"",
        "blank": b" \n\n",
        "random": bytes(range(128, 256)),
        "zeros": bytes(100),
        "utf-16": TEXT.encode("utf-16"),
    }
    if kind in contents:
        path.write_bytes(contents[kind])
    elif kind == "folder":
        path.mkdir()
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    assert main(["join", "--join-file", str(path), *place]) == 3
    assert_told(capfd.readouterr().err, "E-CFG-046", str(path), told)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it is empty"),
        (b"\n", "it is empty"),
        (b"\xff" * 200, "not UTF-8 text"),
        (b"decod1-" * 2000, "more than 10,000 bytes"),
    ],
)
def test_standard_input_without_a_join_string_is_named(
    content: bytes,
    told: str,
    place: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["join", "--join-file", "-", *place]) == 3
    assert_told(capfd.readouterr().err, "E-CFG-046", "from standard input", told)


def test_standard_input_that_is_closed_is_empty(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["join", "--join-file", "-", *place]) == 3
    assert_told(capfd.readouterr().err, "E-CFG-046", "it is empty")


def test_at_a_terminal_the_operator_is_told_to_paste(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the command would seem to hang."""
    master, terminal = os.openpty()
    os.write(master, f"{TEXT[:90]}\n{TEXT[90:-1]}\n\x04".encode())
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert main(["join", "--join-file", "-", *place]) == 4
    said = capfd.readouterr().err
    assert said.startswith("paste the join string, then press Enter and Ctrl-D\n")
    assert_told(said, "it must be host:port")
    os.close(master)


@pytest.mark.parametrize(
    ("mode", "kind", "warns"), [(0o644, "v", True), (0o600, "v", False), (0o644, "m", False)]
)
def test_who_keeps_a_secret_where_others_may_read_it_is_warned(
    mode: int,
    kind: str,
    warns: bool,
    tmp_path: Path,
    others: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    others.append("/bin/bash")
    path = tmp_path / "join.txt"
    path.write_text(f"decod1-{kind}-cut")
    path.chmod(mode)
    assert main(["join", "--join-file", str(path)]) == 4
    said = capfd.readouterr().err
    assert (
        f"warning: other users of this host may read the join string: chmod 600 {path}" in said
    ) == warns


@pytest.mark.parametrize("shells", [[], ["/usr/sbin/nologin", "/bin/false"]])
def test_nobody_is_warned_of_others_where_there_are_none(
    shells: list[str], tmp_path: Path, others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A container, say, or somebody's own machine."""
    others += shells
    path = tmp_path / "join.txt"
    path.write_text("decod1-v-cut")
    path.chmod(0o644)
    for given in (["decod1-v-cut"], ["--join-file", str(path)]):
        assert main(["join", *given]) == 4
        assert "warning" not in capfd.readouterr().err


def test_an_account_that_nobody_can_log_in_to_is_nobody_s(
    tmp_path: Path, others: list[str]
) -> None:
    """Images of containers have such accounts."""
    others.append("/bin/bash")
    shadow = tmp_path / "shadow"
    for password, counts in (("!", False), ("*", False), ("!$6$x", False), ("$6$x", True)):
        shadow.write_text(f"root:*:1::\nuser-1500:{password}:1:0:::::\nodd\n")
        assert secret.has_other_users(tmp_path, shadow) == counts
    assert secret.has_other_users(tmp_path, tmp_path / "none"), "this user may not know"


def test_who_is_logged_in_without_an_entry_in_the_list_of_users_counts(
    tmp_path: Path, others: list[str]
) -> None:
    """The list may be a directory's, which does not name everybody."""
    del others[:]
    for number, login in enumerate((2**32 - 1, os.getuid(), 0)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "loginuid").write_text(str(login))
    assert not secret.has_other_users(tmp_path)
    (tmp_path / "0" / "loginuid").write_text("1234567")
    assert secret.has_other_users(tmp_path)


@pytest.mark.parametrize(("kind", "warns"), [("v", True), ("d", True), ("m", False)])
def test_a_secret_on_the_command_line_comes_with_a_warning(
    kind: str, warns: bool, others: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    others.append("/bin/bash")
    assert main(["join", f"decod1-{kind}-cut"]) == 4
    said = capfd.readouterr().err
    assert ("warning: other users of this host can see the join string" in said) == warns
    assert ("--join-file FILE" in said) == warns


def test_a_line_with_spaces_in_it_need_not_be_quoted(
    monkeypatch: pytest.MonkeyPatch, place: list[str]
) -> None:
    seen = []
    monkeypatch.setattr("decod.daemon.life.run_join", lambda options, _: seen.append(options) or 0)
    assert main(["join", "decod", "join", TEXT[:50], TEXT[50:], "--stage", "1", *place]) == 0
    assert JoinString.parse(seen[0].join_string) == JoinString.parse(TEXT)
    assert seen[0].stage_index == 1


@pytest.mark.parametrize(
    ("options", "following"),
    [
        (
            ("--state-dir", "/tmp/mine"),
            "decod credit --state-dir /tmp/mine shows what this host has done",
        ),
        (("--dry-run",), "the same command without --dry-run joins"),
    ],
)
def test_the_last_line_says_what_to_do_next(
    options: tuple[str, ...],
    following: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("decod.daemon.life.run_join", lambda *_: 0)
    monkeypatch.setattr("decod.daemon.demands.run_dry", lambda *_: 0)
    assert main(["join", TEXT, *options]) == 0
    assert capfd.readouterr().out == f"next: {following}\n"


@pytest.mark.parametrize(
    ("arguments", "variables", "moves"),
    [
        ((), {}, True),
        (("--listen", "0.0.0.0:7700"), {}, False),
        (("--advertise", "example.org:7700"), {}, False),
        ((), {"DECOD_LISTEN": "0.0.0.0:7700"}, False),
    ],
)
def test_only_a_port_that_nobody_has_chosen_may_be_another(
    arguments: tuple[str, ...],
    variables: dict[str, str],
    moves: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr("decod.daemon.life.run_join", lambda options, _: seen.append(options) or 0)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert main(["join", TEXT, *arguments]) == 0
    assert seen[0].node.moves_port is moves
