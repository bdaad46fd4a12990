"""Shared option types: a wrong value is a usage error with an example."""

import click
import pytest
from click.testing import CliRunner

from decod.cli.options import ADDRESS, AutoOrCount


@click.command()
@click.option("--listen", type=ADDRESS, default="0.0.0.0:7700")
@click.option("--stage", type=AutoOrCount(minimum=1, maximum=4095), default="auto")
def show(listen: tuple[str, int], stage: int | None) -> None:
    click.echo(f"{listen[0]} {listen[1]} {stage}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "0.0.0.0 7700 None\n"),
        (["--listen", "[::1]:5", "--stage", "2"], "::1 5 2\n"),
        (["--stage", "auto"], "0.0.0.0 7700 None\n"),
    ],
)
def test_good_values_are_converted(arguments: list[str], expected: str) -> None:
    assert CliRunner().invoke(show, arguments).output == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--listen", "0.0.0.0:99999"], "0.0.0.0:7700"),
        (["--listen", ":abc"], "0.0.0.0:7700"),
        (["--listen", "::1:7700"], "[::1]:7700"),
        (["--stage", "0"], "neither auto nor a number from 1 to 4095"),
        (["--stage", "4096"], "neither auto nor a number from 1 to 4095"),
        (["--stage", "-1"], "neither auto nor a number from 1"),
        (["--stage", "two"], "neither auto nor a number from 1"),
        (["--stage", "9" * 5000], "neither auto nor a number from 1"),
    ],
)
def test_bad_values_are_usage_errors(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(show, arguments)
    assert result.exit_code == 2
    assert expected in " ".join(result.output.split())
