"""Errors of decod that a script does not catch."""

import sys

import pytest

from decod.errors import NetworkError, TrainingError
from decod.exit_codes import ExitCode
from decod.optimizer import optimizer as module
from decod.optimizer.settings import read_join


def test_an_error_is_one_message_with_its_place_and_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = NetworkError("nobody answers", why="it is gone", fix="ask another one")
    with pytest.raises(SystemExit) as ended:
        module._show(NetworkError, error, None)
    assert ended.value.code == int(ExitCode.NETWORK)
    assert capsys.readouterr().err == f"error: {error}\n"


def test_the_place_is_in_the_users_code(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        read_join(3)
    except Exception as error:  # noqa: BLE001 - any error does.
        with pytest.raises(SystemExit):
            module._show(type(error), error, error.__traceback__)
    assert f"  in {__file__}, line " in capsys.readouterr().err


def test_errors_in_decod_itself_and_of_others_keep_their_tracebacks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for error in (ValueError("x"), TrainingError("x", why="y", fix="z", code="E-INT-004")):
        module._show(type(error), error, None)
        told = capsys.readouterr().err
        assert type(error).__name__ in told
        assert not told.startswith("error:")


def test_a_hook_of_somebody_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*_: object) -> None:
        """Somebody's."""

    monkeypatch.setattr(sys, "excepthook", own)
    module.show_plainly()
    assert sys.excepthook is own
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    module.show_plainly()
    assert sys.excepthook is module._show
