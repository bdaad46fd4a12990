"""Container files are true: commands that exist, and folders that the image has."""

import re
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from decod.cli.main import cli

DOCKER = Path(__file__).resolve().parents[2] / "docker"
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))


def load(path: Path) -> dict[str, Any]:
    text = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", path.read_text(encoding="utf-8"))
    loaded = yaml.safe_load(text)
    assert isinstance(loaded, dict)
    return loaded


def mounts(service: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the source and the target of each mounted volume."""
    return [tuple(volume.split(":")[:2]) for volume in service.get("volumes", [])]


def test_there_is_one_to_train_and_one_to_volunteer() -> None:
    assert [path.name for path in COMPOSE] == ["compose.train.yaml", "compose.volunteer.yaml"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_every_container_runs_a_command_that_there_is(path: Path) -> None:
    for name, service in load(path)["services"].items():
        kind, *arguments = service["command"]
        command = cli.get_command(click.Context(cli), kind)
        assert command is not None, name
        given = command.make_context(kind, arguments).params
        assert str(given["state_dir"]) == "/state"
        # A node needs longer than Docker's 10 s to leave.
        assert int(service["stop_grace_period"].removesuffix("s")) > given["drain_timeout"]
        assert service["restart"] == "unless-stopped", "it is back after a boot"
        assert service["init"] is True
        joined = given.get("join_file")
        assert joined is None or str(joined).startswith(("/shared/", "/run/secrets/"))


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_what_is_mounted_is_declared_and_belongs_to_the_user_of_the_image(path: Path) -> None:
    compose, dockerfile = load(path), (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    (owned,) = re.findall(r"install -d -o decod -g decod (.*)", dockerfile)
    named = set(compose.get("volumes", {}))
    used = set()
    for service in compose["services"].values():
        assert service["build"] == {"context": "..", "dockerfile": "docker/Dockerfile"}
        for source, target in mounts(service):
            if source.startswith("."):
                continue
            used.add(source)
            assert target in owned.split(), "Docker would give it to root"
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"]
    assert used == named


def test_relays_read_the_join_string_where_the_leader_writes_it() -> None:
    services = load(DOCKER / "compose.train.yaml")["services"]
    command = services["leader"]["command"]
    written = command[command.index("--write-join") + 1]
    relays = [service for name, service in services.items() if name != "leader"]
    assert len(relays) == 2
    for relay in relays:
        assert relay["command"][relay["command"].index("--join-file") + 1] == written
        assert relay["depends_on"] == {"leader": {"condition": "service_healthy"}}
    assert services["leader"]["healthcheck"]["test"][-1] == written
