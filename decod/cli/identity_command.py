"""`decod identity`: shows, copies and brings back the key by which others know this node."""

import base64
import os
import sys
from pathlib import Path

import click

from decod.cli.node_options import state_dir_option
from decod.cli.printing import json_text
from decod.errors import ConfigError
from decod.files import open_ordinary
from decod.membership.identity import (
    KEY_FILE,
    KEY_SIZE_MAX_BYTES,
    HostKey,
    keep_identity,
    load_identity,
    parse_identity,
    write_key,
)


@click.group(no_args_is_help=True)
def identity() -> None:
    """Show, copy or bring back this node's identity.

    \b
    Examples:
      decod identity show
      decod identity export node.key
      decod identity import node.key --state-dir /tmp/relay-1

    A node makes a key when it starts for the first time. Others know it by this key. Whoever has a
    copy can act as this node.
    """


@identity.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@state_dir_option
def show(*, as_json: bool, state_dir: Path) -> None:
    """Print the id, the name and the public key of this node.

    \b
    Examples:
      decod identity show
      decod identity show --state-dir /tmp/relay-1 --json
    """
    found = _existing(state_dir)
    public = base64.b64encode(found.public).decode()
    if as_json:
        click.echo(json_text({"id": found.node_id, "name": found.name, "public_key": public}))
        return
    click.echo(f"id          {found.node_id}")
    click.echo(f"name        {found.name}")
    click.echo(f"public key  {public}")
    click.echo(f"kept in     {state_dir / KEY_FILE}")


@identity.command()
@click.argument("path", type=click.Path(path_type=Path, allow_dash=True))
@state_dir_option
def export(path: Path, *, state_dir: Path) -> None:
    """Write a copy of the key to PATH, which must not exist; `-` prints it.

    \b
    Examples:
      decod identity export node.key
      decod identity export - | age -r age1... > node.key.age

    Keep the copy secret: whoever has it can act as this node.
    """
    found = _existing(state_dir)
    if str(path) == "-":
        click.echo(found.to_pem().decode(), nl=False)
        return
    try:
        write_key(path, found)
    except OSError as error:
        raise ConfigError(
            f"can't write the key to {path}",
            why=error.strerror or str(error),
            fix="give a new file in a folder that you may write to",
            code="E-CFG-034",
        ) from error
    click.echo(f"{found.name} is copied to {path}")


@identity.command("import")
@click.argument("path", type=click.Path(path_type=Path, allow_dash=True))
@state_dir_option
def import_(path: Path, *, state_dir: Path) -> None:
    """Give the node in --state-dir the identity in PATH; `-` reads standard input.

    \b
    Examples:
      decod identity import node.key
      age -d node.key.age | decod identity import -

    A folder that has an identity keeps it. Don't run two nodes with the same one.
    """
    found = parse_identity(_read(path), "standard input" if str(path) == "-" else str(path))
    kept = keep_identity(state_dir, found)
    if kept != found:
        raise ConfigError(
            f"{state_dir} holds the identity of {kept.name} already",
            why="if it were replaced, that node would be lost",
            fix="give an empty --state-dir, or export and delete its identity.key first",
            code="E-CFG-035",
        )
    click.echo(f"the node in {state_dir} is {found.name}")


def _existing(state_dir: Path) -> HostKey:
    try:
        return load_identity(state_dir)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{state_dir} holds no identity",
            why="a node makes it when it starts for the first time",
            fix="start the node, or name its folder with --state-dir",
            code="E-CFG-036",
        ) from error


def _read(path: Path) -> bytes:
    try:
        if str(path) == "-":
            return sys.stdin.buffer.read(KEY_SIZE_MAX_BYTES + 1)
        with open_ordinary(path) as descriptor:
            return os.read(descriptor, KEY_SIZE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"can't read a key from {path}",
            why=error.strerror or str(error),
            fix="give the file that `decod identity export` has written",
            code="E-CFG-034",
        ) from error
