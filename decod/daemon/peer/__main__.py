"""The node process of a training loop: core and sockets, no torch. Nobody types this command."""

import argparse
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from decod.config.node_config import NodeConfig, parse_listen
from decod.config.terms import RunTerms
from decod.daemon.host import Host, Leaving, run_until_left
from decod.daemon.page.page_server import page_served
from decod.daemon.peer.loop_link import LoopFacts, LoopLink, LoopMessage
from decod.daemon.peer.peer_entry import begin, free_folders, join_run
from decod.daemon.peer.peer_node import PeerNode
from decod.errors import ConfigError, DecodError
from decod.exit_codes import ExitCode
from decod.memory_files import remove_orphans
from decod.paths import full_path
from decod.protocol.collaboration.loop import RoundConfig
from decod.protocol.core.effects import StopReason
from decod.protocol.core.messages.round_messages import Height
from decod.tasks import beside
from decod.wire import validate

_JOINED = "joined"
"""Stands for the name of a run that is not known yet."""


def say(line: str) -> None:
    """Tell the user something."""
    sys.stderr.write(f"decod: {line}\n")


def facts_of(hello: LoopMessage) -> LoopFacts:
    """Return what a loop says of itself."""
    settings: Any = hello.fields.get("settings", {})
    shapes: Any = hello.fields.get("shapes", [])
    terms = RunTerms(
        run=settings["run"] or _JOINED,
        target_batch_size=settings["target_batch_size"],
        use_local_updates=settings["use_local_updates"],
        compression=settings["compression"],
        wide=hello.text("wide"),
        num_elements=hello.number("num_elements"),
        fingerprint=hello.text("fingerprint"),
    )
    state_id = validate.sha256("state_hash", hello.text("state_hash"))
    return LoopFacts(
        terms=terms,
        shapes=tuple(map(tuple, shapes)),
        height=Height(hello.number("round"), state_id),
        rounds=RoundConfig(
            target_batch_size=terms.target_batch_size,
            share=settings["share"] or 0,
            overlap=settings["overlap"],
            averaging_timeout_s=float(settings["averaging_timeout_s"]),
        ),
        batch_size_per_step=settings["batch_size_per_step"],
        accumulation_steps=settings["gradient_accumulation_steps"],
        device=hello.text("device")[:64],
    )


def config_of(settings: dict[str, Any], state_dir: Path) -> NodeConfig:
    """Return this host's choices."""
    host, port = parse_listen(settings["listen"])
    return NodeConfig(
        listen_host=host,
        listen_port=port,
        advertise=settings["advertise"],
        num_threads=1,
        state_dir=state_dir,
        name=settings["name"],
        upload_max_mbit=settings["upload_max_mbit"],
        serves_page=settings["page"],
    )


def settle(settings: dict[str, Any], leaving: Leaving) -> tuple[NodeConfig, Host]:
    """Take the script's state folder. If it has chosen none, take a folder that no loop here uses.

    Raises:
        DecodError: It is in use, or can't be used.
    """
    if settings["state_dir"]:
        config = config_of(settings, full_path(Path(settings["state_dir"])))
        return config, Host(config, leaving)
    for folder in free_folders():
        config = config_of(settings, folder)
        try:
            return config, Host(config, leaving)
        except ConfigError as error:
            if error.code != "E-CFG-041":  # Another loop has just taken it.
                raise
    raise ConfigError(
        "all state folders of training loops on this host are in use",
        why="each loop needs one of its own",
        fix="end scripts that are no longer needed, or give this one a state_dir",
        code="E-CFG-041",
    )


async def _run(descriptor: int) -> int:
    link = await LoopLink.open(descriptor)
    try:
        return await _serve(link)
    except DecodError as error:
        link.refuse(error)
        return int(error.exit_code)
    finally:
        await link.close()


async def _serve(link: LoopLink) -> int:
    hello = await link.next()
    if hello is None:
        return ExitCode.OK
    remove_orphans()
    loop, settings = facts_of(hello), hello.fields["settings"]
    async with AsyncExitStack() as stack:
        leaving = stack.enter_context(Leaving(say))
        config, host = settle(settings, leaving)
        stack.enter_context(host)
        await stack.enter_async_context(host.tended())
        await stack.enter_async_context(page_served(config, host, say))

        async def enter() -> PeerNode:
            join, terms = settings["join"], loop.terms
            entering = join_run(join, terms, host, say) if join else begin(terms, host, say)
            part = await entering
            node = PeerNode(loop, part, config, host, link, say)
            return await stack.enter_async_context(node)

        async with beside(_leave_with(link, leaving)):
            node = await leaving.unless_asked(enter())
        await host.present(node)
        stop = await node.serve(leaving.asked)
    return ExitCode.OK if stop.reason is StopReason.DRAINED else ExitCode.DEGRADED


async def _leave_with(link: LoopLink, leaving: Leaving) -> None:
    """Leave if the loop ends while its node joins a run. Till then it has nothing more to say."""
    await link.next()
    leaving.asked.set()


def main(arguments: list[str] | None = None) -> int:
    """Serve a loop until it ends."""
    logging.captureWarnings(capture=True)
    parser = argparse.ArgumentParser(prog="python -m decod.daemon.peer")
    parser.add_argument("--socket-fd", type=int, required=True)
    options = parser.parse_args(arguments)
    return run_until_left(_run(options.socket_fd), say)


if __name__ == "__main__":
    sys.exit(main())
