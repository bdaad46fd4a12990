"""Nodes for tests: built like a daemon's, but nothing of them listens until a test says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from decod.config.node_config import NodeConfig
from decod.config.schema import Manifest
from decod.daemon.host import Host, Leaving
from decod.daemon.pipeline_node import PipelineNode
from decod.daemon.run_facts import RunPart
from decod.driver.driver import NodeDriver
from decod.ids import RunId
from decod.membership.ban_list import BanBook
from decod.membership.papers import membership_folder
from decod.membership.statements import new_charter
from decod.protocol.core.effects import Note
from decod.protocol.core.view import Role
from decod.run.model_config import ModelConfig
from decod.run.run_config import Organisation, RunConfig
from decod.run.training_config import BatchConfig
from tests.support.members import data_node, membership_of

RUN_ID = RunId("r" * 26)
STRANGER = data_node("stranger").node_id


def make_manifest(**changes: object) -> Manifest:
    sizes = {"vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    run = RunConfig(
        name="tiny",
        model=ModelConfig(**sizes),  # type: ignore[arg-type]
        batch=BatchConfig(sequence_length=8, microbatch_size=2, num_microbatches=2),
        **changes,  # type: ignore[arg-type]
    )
    return Manifest(run=run, data_index_sha256="0" * 64, data_vocab_size=257)


@contextmanager
def make_node(
    folder: Path,
    *,
    leads: bool = True,
    again: bool = False,
    port: int = 0,
    capacity: int | None = None,
    organisation: Organisation = Organisation.PIPELINE,
) -> Iterator[PipelineNode]:
    """Yields a node of a tiny run; to be used within an event loop."""
    config = NodeConfig(
        listen_host="127.0.0.1", listen_port=port, state_dir=folder, name="me", capacity=capacity
    )
    with Host(config, Leaving(_say)) as host:
        manifest, host_key = make_manifest(organisation=organisation), host.identity
        member = membership_of(host_key, Role.DATA if leads else Role.RELAY)
        member.folder = membership_folder(folder, member.root)
        member.bans = BanBook(member.root, member.folder)
        part = RunPart(
            membership=member,
            run_id=RUN_ID,
            manifest=manifest,
            charter=new_charter(data_node("leader"), RUN_ID, manifest.to_json()),
            leader=host.identity.node_id if leads else STRANGER,
            leader_address="" if leads else "127.0.0.1:1",
        )
        yield PipelineNode(config, part, host, _say, again=again)


def give_driver(node: PipelineNode, driver: object) -> None:
    """Give a node a core that runs in `driver`."""
    node.core.attach(cast("NodeDriver", driver))


def _say(_: str) -> None:
    pass


def tell(node: PipelineNode, note: Note) -> None:
    """Have a node take in a note of its core."""
    node.note(note.event, **dict(note.fields))
