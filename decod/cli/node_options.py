"""Options that `decod leader` and `decod join` share: a host's choices for its node."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from decod.cli.options import ADDRESS, AddressType, AutoOrCount, DurationType, WrittenType, words
from decod.cli.printing import ReportPlace, print_warning
from decod.config.node_config import (
    CAPACITY_MAX,
    DEFAULT_PORT,
    NUM_THREADS_MAX,
    PAGE_HOST,
    PAGE_PORT,
    NodeConfig,
    Recompute,
    Spread,
    default_state_dir,
    read_rate,
    read_size,
)
from decod.config.schedule import (
    ALWAYS,
    DEFAULT_PAUSE_RULES,
    NO_RULES,
    PauseRule,
    WorkHours,
    read_rules,
    show_rules,
)
from decod.config.secret import (
    JOIN_STRING_MAX_CHARACTERS,
    has_other_users,
    holds_secret,
    others_may_read,
    read_join_string,
    text_of,
)
from decod.journal.terminal import PatientTerminal
from decod.objects import is_url
from decod.paths import full_path
from decod.texts import clean_text

_STDIN = "standard input"

_LAST_LINES_S = 1.0
"""Timeout of writing a node's last lines to the terminal."""

Command = TypeVar("Command", bound=Callable[..., Any])


def _reported_there(context: click.Context, _: click.Parameter, folder: Path) -> Path:
    place = context.find_object(ReportPlace)
    if place is not None:
        place.use(folder)
    return folder


state_dir_option = click.option(
    "--state-dir",
    envvar="DECOD_STATE_DIR",
    callback=_reported_there,
    type=click.Path(file_okay=False, path_type=Path),
    default=default_state_dir,
    metavar="DIR",
    help="Folder of the node: identity, logs, control socket. One for each node of a host.",
)


def _unless_given(context: click.Context, _: click.Parameter, file: Path | None) -> Path | None:
    """Return the file, unless a variable names it and the command line has a join string."""
    of_variable = context.get_parameter_source("join_file") is ParameterSource.ENVIRONMENT
    # What the command line gives is processed first.
    given = context.params.get("join_string") or context.params.get("join")
    return None if of_variable and given else file


def join_file_option(envvar: str | None = None) -> Callable[[Command], Command]:
    """Return the option for a file with a join string."""
    return click.option(
        "--join-file",
        envvar=envvar,
        callback=_unless_given,
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help="Read the join string from this file, or with - from standard input: everybody on"
        " this host can see a command line.",
    )


device_option = click.option(
    "--device",
    envvar="DECOD_DEVICE",
    default="auto",
    show_default=True,
    metavar="DEVICE",
    shell_complete=words("auto", "cpu", "cuda", "xpu", "mps"),
    help="auto, cpu, cuda (NVIDIA, AMD), xpu (Intel) or mps (Apple). cuda:1 is the second. auto is"
    " a GPU if one works, and otherwise the CPU. Several, such as cuda:0,cuda:1, divide each"
    " microbatch.",
)

listen_option = click.option(
    "--listen",
    envvar="DECOD_LISTEN",
    type=ADDRESS,
    default=f"0.0.0.0:{DEFAULT_PORT}",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen (TCP and UDP); port 0 takes a free one. If the default is in use,"
    " `decod join` takes one of the next ports.",
)

advertise_option = click.option(
    "--advertise",
    envvar="DECOD_ADVERTISE",
    metavar="HOST:PORT",
    help="Where others reach this node, if not there: behind a router, say.",
)

checkpoint_store_option = click.option(
    "--checkpoint-store",
    envvar="DECOD_CHECKPOINT_STORE",
    metavar="URL|DIR",
    callback=lambda _context, _option, value: _store_place(value),
    help="Store of the run's checkpoints that all members with this option share: s3://BUCKET/RUN,"
    " say, or a folder on NFS. A member of each stage writes its stage's part there.",
)


def _store_place(text: str | None) -> str | None:
    """Return a store's URL as it is, and its path so that it holds wherever a node works."""
    if text is None or is_url(text):
        return text
    return str(full_path(Path(text)))


_OPTIONS = (
    listen_option,
    advertise_option,
    device_option,
    click.option(
        "--spread",
        envvar="DECOD_SPREAD",
        type=click.Choice([each.value for each in Spread]),
        default=Spread.AUTO.value,
        show_default=True,
        help="With several devices: copy the stage to each, or shard it, with the optimizer in the"
        " host's memory: slower. auto shards if the stage does not fit on each.",
    ),
    click.option(
        "--capacity",
        envvar="DECOD_CAPACITY",
        type=AutoOrCount(minimum=1, maximum=CAPACITY_MAX),
        default="auto",
        show_default=True,
        metavar="auto|N",
        help=f"Microbatches held in memory at a time, 1 to {CAPACITY_MAX}; auto measures.",
    ),
    click.option(
        "--recompute",
        envvar="DECOD_RECOMPUTE",
        type=click.Choice([each.value for each in Recompute]),
        default=Recompute.AUTO.value,
        show_default=True,
        help="Keep only the inputs of forward passes, and compute the passes again for backward:"
        " less memory, a third more work, the same numbers. auto does so if memory is short.",
    ),
    click.option(
        "--threads",
        envvar="DECOD_THREADS",
        type=click.IntRange(min=1, max=NUM_THREADS_MAX),
        metavar="N",
        help="Threads for computing on the CPU; torch decides if left out.",
    ),
    click.option(
        "--upload-max",
        envvar="DECOD_UPLOAD_MAX",
        type=WrittenType("rate", read_rate),
        metavar="RATE",
        help="Most that this node sends, like 20Mbit or 1Gbit (a second), at least 1Mbit. Without"
        " it, all that the link takes.",
    ),
    click.option(
        "--download-max",
        envvar="DECOD_DOWNLOAD_MAX",
        type=WrittenType("rate", read_rate),
        metavar="RATE",
        help="Most that this node takes from others, like 50Mbit, at least 5Mbit.",
    ),
    click.option(
        "--device-memory-max",
        envvar="DECOD_DEVICE_MEMORY_MAX",
        type=WrittenType("size", read_size),
        metavar="SIZE",
        help="Most memory of the device that this node uses, like 10GiB.",
    ),
    click.option(
        "--base",
        envvar="DECOD_BASE",
        type=click.Path(),
        metavar="DIR|ORG/NAME",
        help="The model beside which the run trains an adapter: a folder, or ORG/NAME[@REVISION] on"
        " the Hugging Face Hub. Others than the leader fetch their part from members without it.",
    ),
    click.option(
        "--disk-max",
        envvar="DECOD_DISK_MAX",
        type=WrittenType("size", read_size),
        metavar="SIZE",
        help="Most that the node's folder may hold, like 50GiB. What would exceed it is not"
        " written.",
    ),
    click.option(
        "--drain-timeout",
        envvar="DECOD_DRAIN_TIMEOUT",
        type=DurationType(minimum_s=0.0),
        default="60s",
        show_default=True,
        metavar="TIME",
        help="Longest that leaving may take; then the node goes at once. (A run's leader takes the"
        " time that keeping the model takes.)",
    ),
    click.option(
        "--no-rejoin",
        envvar="DECOD_NO_REJOIN",
        is_flag=True,
        help="Exit with code 75 when the run goes on without this node, instead of joining again.",
    ),
    click.option(
        "--page",
        envvar="DECOD_PAGE",
        type=AddressType(default_port=PAGE_PORT),
        metavar="HOST:PORT",
        help=f"Where to serve the run's web page and metrics [default: {PAGE_HOST}:{PAGE_PORT}, or"
        " a free port if that is taken].",
    ),
    click.option(
        "--no-page", envvar="DECOD_NO_PAGE", is_flag=True, help="Serve no web page and no metrics."
    ),
    click.option(
        "--page-read-only",
        envvar="DECOD_PAGE_READ_ONLY",
        is_flag=True,
        help="Let nobody pause the node, invite others or ban them by the page.",
    ),
    click.option(
        "--no-port-mapping",
        envvar="DECOD_NO_PORT_MAPPING",
        is_flag=True,
        help="Never ask a router to map the port, even if others can't reach this node.",
    ),
    click.option(
        "--pass-on/--no-pass-on",
        "passes_on",
        envvar="DECOD_PASS_ON",
        default=None,
        help="Pass on connections between volunteers of which neither can be dialled. Data nodes do"
        " so unless told otherwise; volunteers only if told.",
    ),
    checkpoint_store_option,
    state_dir_option,
    click.option(
        "--name",
        envvar="DECOD_NAME",
        metavar="NAME",
        help="What others see in `decod status`.",
    ),
)


_VOLUNTEER_OPTIONS = (
    click.option(
        "--schedule",
        envvar="DECOD_SCHEDULE",
        type=WrittenType("schedule", WorkHours.parse, ALWAYS),
        metavar="TIMES",
        help='When this node works, like "22:00-07:00" or "Mon-Fri 22:00-07:00, Sat Sun'
        ' 00:00-24:00". Outside it is paused. Local time.',
    ),
    click.option(
        "--pause-when",
        envvar="DECOD_PAUSE_WHEN",
        type=WrittenType("rules", read_rules, *PauseRule, NO_RULES),
        metavar="RULES",
        help=f"When this node pauses by itself: {NO_RULES}, or some of {','.join(PauseRule)}."
        f" {show_rules(DEFAULT_PAUSE_RULES)} if left out.",
    ),
)


def volunteer_options(command: Command) -> Command:
    """Add the options on when a volunteer's node works, which `node_config` reads."""
    for option in reversed(_VOLUNTEER_OPTIONS):
        command = option(command)
    return command


def node_options(command: Command) -> Command:
    """Add the options that `node_config` reads to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def node_config(options: Mapping[str, Any]) -> NodeConfig:
    """Return the configuration of the node that the options describe.

    Raises:
        ConfigError: A value is well-formed but impossible.
    """
    host, port = options["listen"]
    page_host, page_port = options["page"] or (PAGE_HOST, None)
    return NodeConfig(
        listen_host=host,
        listen_port=port,
        advertise=options["advertise"],
        device=options["device"],
        spread=Spread(options["spread"]),
        capacity=options["capacity"],
        recompute=Recompute(options["recompute"]),
        num_threads=options["threads"],
        upload_max_mbit=options["upload_max"],
        download_max_mbit=options["download_max"],
        device_memory_max_bytes=options["device_memory_max"],
        disk_max_bytes=options["disk_max"],
        base_dir=absolute(None if (base := options.get("base")) is None else Path(base)),
        schedule=options.get("schedule"),
        pause_when=options.get("pause_when"),
        drain_timeout_s=options["drain_timeout"],
        state_dir=full_path(options["state_dir"]),
        name=options["name"],
        rejoins=not options["no_rejoin"],
        checkpoint_store=options["checkpoint_store"],
        tensorboard_dir=absolute(options.get("tensorboard")),
        wandb_project=options.get("wandb"),
        serves_page=not options["no_page"],
        public_page_port=options.get("public_page"),
        page_acts=not options["page_read_only"],
        page_host=page_host,
        page_port=page_port,
        maps_port=not options["no_port_mapping"],
        passes_on=options["passes_on"],
    )


def absolute(path: Path | None) -> Path | None:
    """Return an option's path, which holds wherever a node works."""
    return None if path is None else full_path(path)


def moves_port(context: click.Context) -> bool:
    """Return whether a volunteer may listen on another port than the default one.

    An operator who gives --advertise has usually opened that port in a router.
    """
    chosen = context.get_parameter_source("listen") is not ParameterSource.DEFAULT
    return not chosen and context.params["advertise"] is None


def join_string_of(given: str | None, file: Path | None, *, name: str) -> str | None:
    """Return the join string, from the command line or from a file.

    Other users of this host can see its secret on a command line, or in a file that they may read.
    If there are any, the operator is warned of that.

    Args:
        given: The join string on the command line, if any.
        file: The file that holds it, if any. `-` stands for standard input.
        name: The name of the argument or option for `given`, for errors.

    Raises:
        ConfigError: The file can't be read.
        UsageError: Both are given.
    """
    if file is None:
        if given is not None and holds_secret(given) and has_other_users():
            print_warning(
                "other users of this host can see the join string while this command runs;"
                " --join-file FILE, or - for standard input, hides it"
            )
        return given
    if given is not None:
        raise click.UsageError(f"give {name} or --join-file, not both")
    if str(file) == "-":
        return _from_stdin()
    path = full_path(file)
    text = read_join_string(path)
    if holds_secret(text) and others_may_read(path):
        print_warning(f"other users of this host may read the join string: chmod 600 {path}")
    return text


def _from_stdin() -> str:
    """Return the join string from standard input, which may be a terminal."""
    content = b""
    # It may be closed: then it holds nothing.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stdin.isatty():
            click.echo("paste the join string, then press Enter and Ctrl-D", err=True)
        content = sys.stdin.buffer.read(JOIN_STRING_MAX_CHARACTERS + 1)
    return text_of(content, _STDIN)


@contextlib.contextmanager
def speaking() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a node's lines on stdout, and never blocks."""
    terminal = PatientTerminal(1)

    def say(line: str) -> None:
        terminal.write(clean_text(line, limit=JOIN_STRING_MAX_CHARACTERS) + "\n")

    try:
        yield say
    finally:
        terminal.finish(_LAST_LINES_S)
