"""`decod demo`: five daemons on this machine train a small model, and one of them is killed.

Only the distance is not real: each daemon has its own process, port and folder, and finds the
others by the join string that the leader prints.
"""

import math
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.demo_nodes import (
    PROGRAM,
    Child,
    DemoCommit,
    DemoError,
    Display,
    Fleet,
    blame,
    death_of,
    interrupted_by_signals,
    make_display,
    parse_progress,
)
from decod.cli.node_options import device_option
from decod.cli.options import has_desktop
from decod.config.node_config import DEVICE_LABEL, check_device
from decod.errors import DecodError
from decod.net.join_string import LABEL
from decod.paths import full_path
from decod.texts import clean_text, counted

if TYPE_CHECKING:
    from decod.config import RunConfig

NUM_RELAYS = 4
NUM_RELAY_STAGES = 2
LOSS_FALL_MIN = 0.4
"""The loss must fall by at least this part of the first iteration's loss."""

_MODEL_PREFIX = "model of iteration "
"""The leader prints a line with this prefix when the run is complete and its result on disk."""
_START_TIMEOUT_S = 120.0
"""Timeout of the leader's join string. The first start of torch may be slow."""
_SILENCE_MAX_S = 180.0
"""Longest time between two iterations. A repeated iteration takes far less."""
_LEAVE_TIMEOUT_S = 60.0
"""Timeout of the final export and of all nodes' leaving."""
_SETUP_S = 30.0
_ITERATION_S = 1.0
"""The time that the demo takes on two cores, to begin and for each iteration, for an estimate."""
_PAGE = re.compile(r"the run's page is at (http://[0-9A-Za-z.:\[\]]{1,100}/)$", re.MULTILINE)
"""The line of the leader's log with the page's address."""
_STUCK = "the leader has got stuck"
_PROMPT = "def "
_NUM_SAMPLE_TOKENS = 240

Ask = Callable[[Path, dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The settings of one demo."""

    folder: Path
    model_dir: Path
    num_iterations: int
    device: str
    """The device of all nodes, as `--device` of `decod leader` takes it."""
    program: Sequence[str] = PROGRAM
    show_page: Callable[[str], bool] = lambda _: False
    """Opens the page of the run, and returns whether it could."""


@dataclass(slots=True)
class Story:
    """The events so far."""

    losses: list[float] = field(default_factory=list)
    num_done: int = 0
    killed: Child | None = None
    kill_s: float = 0.0
    """Instant of the kill, on the monotonic clock."""
    recovery_s: float | None = None
    """Time from the kill to the end of the next iteration."""
    page: str = ""
    """Address of the leader's page. Empty: it has not told one yet."""


@click.command()
@click.option(
    "--iterations",
    type=click.IntRange(min=4, max=100_000),
    default=80,
    show_default=True,
    help="Iterations to train.",
)
@click.option(
    "--model-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="OUT",
    help="Where the trained model goes; in the demo's folder if left out.",
)
@device_option
@click.option("--keep", is_flag=True, help="Keep the nodes' state folders too, not only the logs.")
def demo(*, iterations: int, model_dir: Path | None, device: str, keep: bool) -> int:
    """Train a small model with five nodes on this machine.

    \b
    Examples:
      decod demo
      decod demo --iterations 200 --model-dir ./model

    A leader and four relays in two stages learn from the source text of Python's library. Half-way
    one relay is killed without warning; training goes on. Takes about two minutes. On a desktop,
    the run's page opens in the browser. All nodes share the device.
    """
    check_device(device)
    folder = Path(tempfile.mkdtemp(prefix="decod-demo-"))
    plan = DemoPlan(
        folder=folder,
        model_dir=full_path(model_dir or folder / "model"),
        num_iterations=iterations,
        device=device,
        show_page=show_page,
    )
    try:
        with interrupted_by_signals(), make_display(iterations) as display:
            minutes = math.ceil((_SETUP_S + iterations * _ITERATION_S) / 60)
            about = counted(minutes, "minute")
            display.note(f"{iterations} iterations with five nodes take about {about} on two cores")
            display.note(f"everything is in {folder}; logs in {folder / 'logs'}")
            story = play(plan, display, ask=_ask)
    except DemoError as error:
        for line in error.log_tail:
            click.echo(line, err=True)
        raise
    check_learnt(story, plan.folder)
    click.echo(summary(story))
    click.echo(f"sample (prompt {_PROMPT!r}):\n{sample(plan.model_dir)}")
    if not keep:
        for name in ("leader", *_relay_names()):
            shutil.rmtree(folder / name, ignore_errors=True)
    click.echo(f"model: {plan.model_dir}")
    click.echo(f"logs: {folder / 'logs'}")
    click.echo(next_steps(plan.model_dir))
    return 0


def run_config(num_iterations: int) -> "RunConfig":
    """Return a run that learns to write fragments of Python on two cores in a minute or two."""
    from decod.config import RunConfig
    from decod.run.model_config import ModelConfig
    from decod.run.protocol_config import ProtocolConfig
    from decod.run.stages_config import StagesConfig
    from decod.run.training_config import BatchConfig, OptimizerConfig

    return RunConfig(
        name="demo",
        num_iterations=num_iterations,
        model=ModelConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        ),
        stages=StagesConfig(num_relay_stages=NUM_RELAY_STAGES),
        batch=BatchConfig(sequence_length=128, microbatch_size=4, num_microbatches=8),
        optimizer=OptimizerConfig(lr=1e-2, warmup_iterations=5),
        # Timeouts are short: all nodes are on one host, so a slow node is gone. Training waits for
        # both relays of each stage, so that one can be killed.
        protocol=ProtocolConfig(
            heartbeat_interval_s=0.5,
            heartbeat_timeout_s=3.0,
            probe_timeout_s=2.0,
            complete_timeout_s=10.0,
            iteration_timeout_s=60.0,
            min_nodes_per_stage=NUM_RELAYS // NUM_RELAY_STAGES,
        ),
    )


def play(plan: DemoPlan, display: Display, *, ask: Ask) -> Story:
    """Train the model, and kill a relay half-way.

    Args:
        plan: The settings.
        display: Shows the events.
        ask: Asks the daemon of a state folder.

    Raises:
        DemoError: A daemon ended with an error, or there was no progress for too long.
    """
    run_path = plan.folder / "run.toml"
    _write_run_file(plan, run_path, display)
    story = Story()
    options = ("--device", plan.device)
    with Fleet(plan.folder, program=plan.program, options=options) as fleet:
        display.note("starting the leader")
        arguments = ["leader", str(run_path), "--export", str(plan.model_dir)]
        leader = fleet.start("leader", arguments, listen=True)
        join_string = _wait_for_join_string(fleet, leader, display)
        display.note(f"the leader's join string: {join_string}")
        for name in _relay_names():
            quietly = ["--no-page", "--pause-when", "none"]
            fleet.start(name, ["join", join_string, "--stage", "auto", *quietly])
        display.note(f"started {NUM_RELAYS} relays with `decod join JOINSTRING --stage auto`")
        _train(story, plan, fleet, display, ask)
        display.note("all iterations are done and the model is written; the nodes leave")
        _wait_for_the_end(fleet, leader)
    return story


def _train(story: Story, plan: DemoPlan, fleet: Fleet, display: Display, ask: Ask) -> None:
    """Read the leader's output until it has written the model."""
    leader = fleet.children[0]
    last_s = time.monotonic()
    while True:
        line = fleet.next_line(timeout_s=0.2)
        if not story.page:
            _show_page(story, plan, leader, display)
        if line is None:
            fleet.refuse_deaths()
            _refuse_end(leader)
            if time.monotonic() - last_s > _SILENCE_MAX_S:
                raise blame(leader, f"no iteration for {_SILENCE_MAX_S:.0f} s", why=_STUCK)
            continue
        if line.startswith(_MODEL_PREFIX):
            story.num_done = plan.num_iterations
            return
        progress = parse_progress(line)
        if progress is not None:
            last_s = time.monotonic()
            _follow(story, progress, display)
            if story.killed is None and story.num_done >= plan.num_iterations // 2:
                _kill_a_relay(story, fleet, display, ask)


def _show_page(story: Story, plan: DemoPlan, leader: Child, display: Display) -> None:
    """Open the run's page, or say where it is, once the leader's log names it."""
    with suppress(OSError):
        found = _PAGE.search(leader.log_path.read_text(encoding="utf-8", errors="replace"))
        if found is not None:
            story.page = found[1]
            opened = plan.show_page(story.page)
            how = "opens in your browser" if opened else "can be opened in a browser meanwhile"
            display.note(f"the page of the run {how}: {story.page}")


def show_page(url: str) -> bool:
    """Open an address in the browser of this desktop; return whether there is one.

    A terminal without a desktop has none, and a browser for terminals would hide the demo.
    """
    if not (sys.stdout.isatty() and has_desktop()):
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if type(browser) is webbrowser.GenericBrowser:
        return False  # It would run in this terminal.
    # Some browsers wait for seconds whether they have started.
    threading.Thread(target=browser.open, args=(url,), daemon=True).start()
    return True


def next_steps(model_dir: Path) -> str:
    """Return what to do after the demo."""
    # A fresh clone has the command in its own folder only.
    command = "decod" if shutil.which("decod") else f"{shlex.quote(sys.executable)} -m decod"
    model = shlex.quote(str(model_dir))
    return (
        "next:\n"
        f"  let the model go on with a text:  {command} generate --model {model} {_PROMPT!r}\n"
        f"  write the file of your own run:   {command} run init run.toml\n"
        f"  start it, and hand out its join string:  {command} leader run.toml"
    )


def _relay_names() -> list[str]:
    return [f"relay-{number}" for number in range(1, NUM_RELAYS + 1)]


def _write_run_file(plan: DemoPlan, path: Path, display: Display) -> None:
    from decod.config.run_file import render_run_file
    from decod.data.corpus import default_corpus

    display.note("corpus: the source text of Python's standard library")
    default_corpus()
    path.write_text(render_run_file(run_config(plan.num_iterations)), encoding="utf-8")


def _wait_for_join_string(fleet: Fleet, leader: Child, display: Display) -> str:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        line = fleet.next_line(timeout_s=0.2)
        if line is not None and line.startswith(LABEL):
            return line.removeprefix(LABEL).strip()
        if line is not None and line.startswith(DEVICE_LABEL):
            display.note(f"the leader's {clean_text(line)}")
        if line is None:
            _refuse_end(leader)
    raise blame(leader, f"no join string within {_START_TIMEOUT_S:.0f} s", why=_STUCK)


def _refuse_end(leader: Child) -> None:
    code = leader.process.poll()
    if code is not None:
        raise death_of(leader, code)


def _follow(story: Story, progress: DemoCommit, display: Display) -> None:
    story.losses.append(progress.loss)
    story.num_done = progress.iteration
    display.progress(progress)
    if story.killed is not None and story.recovery_s is None:
        story.recovery_s = time.monotonic() - story.kill_s
        display.note(
            f"training goes on without {story.killed.name}: iteration {progress.iteration} was "
            f"done {story.recovery_s:.1f} s after the kill"
        )


def _kill_a_relay(story: Story, fleet: Fleet, display: Display, ask: Ask) -> None:
    """Kill a relay, but not the last of its stage, with which the stage's weights would be lost."""
    leader, *relays = fleet.children
    names = spare_relays(ask(leader.state_dir, {"command": "status"}))
    spare = [child for child in relays if child.name in names]
    if not spare:
        return
    victim = spare[-1]
    display.note(
        f"killing {victim.name} (process {victim.process.pid}) with SIGKILL after iteration "
        f"{story.num_done}"
    )
    story.kill_s = time.monotonic()
    fleet.kill(victim)
    story.killed = victim


def spare_relays(status: Mapping[str, Any]) -> set[str]:
    """Return the names of the relays in a status whose stage has another member."""
    names: set[str] = set()
    for stage in status.get("stages", []):
        if stage["index"] > 0 and len(stage["nodes"]) > 1:
            names.update(node["name"] for node in stage["nodes"])
    return names


def _wait_for_the_end(fleet: Fleet, leader: Child) -> None:
    fleet.wait_for_ends(timeout_s=_LEAVE_TIMEOUT_S)
    fleet.refuse_deaths()
    if leader.process.poll() is None:
        raise blame(leader, f"no end within {_LEAVE_TIMEOUT_S:.0f} s", why=_STUCK)


def _ask(state_dir: Path, request: dict[str, Any]) -> Mapping[str, Any]:
    from decod.daemon.control import ask

    try:
        return ask(state_dir, request, timeout_s=5.0)
    except DecodError:
        # The caller asks again after the next iteration.
        return {}


def check_learnt(story: Story, folder: Path) -> None:
    """Check that the demo has shown learning, and recovery from a lost relay.

    Raises:
        DemoError: The loss fell too little, or no relay was killed.
    """
    if not story.losses:
        raise DemoError(
            "the leader told of no loss",
            why="at least the first and the last iteration's are needed",
            fix=f"read the logs in {folder / 'logs'}",
            code="E-RUN-023",
        )
    first = story.losses[0]
    last = story.losses[-1]
    # Written so that NaN fails.
    if not last <= (1 - LOSS_FALL_MIN) * first:
        raise DemoError(
            f"the loss went from {first:.3f} to {last:.3f}",
            why=f"it should fall by {LOSS_FALL_MIN:.0%} at least",
            fix=f"give more --iterations, or read the logs in {folder / 'logs'}",
            code="E-RUN-021",
        )
    if story.killed is None or story.recovery_s is None:
        raise DemoError(
            "no relay was killed, or no iteration followed",
            why="no stage had two members half-way",
            fix=f"read the logs in {folder / 'logs'}",
            code="E-RUN-022",
        )


def summary(story: Story) -> str:
    """Return the result as one line."""
    first = story.losses[0]
    last = story.losses[-1]
    return (
        f"loss {first:.3f} -> {last:.3f} (-{1 - last / first:.0%}) in {story.num_done} "
        "iterations, one relay lost on the way"
    )


def sample(model_dir: Path) -> str:
    """Return a text that the trained model writes, with control characters replaced."""
    import torch

    from decod.data.tokenizer import BytesTokenizer
    from decod.model.generate import LoadedModel
    from decod.model.sampling import Sampling

    # One token is too little work to share. On a busy host, threads would mostly wait.
    torch.set_num_threads(1)
    prompt = list(_PROMPT.encode())
    sampling = Sampling(temperature=0.7)
    model = LoadedModel(model_dir)
    ids = model.continuation(prompt, sampling, num_tokens=_NUM_SAMPLE_TOKENS)
    text = BytesTokenizer().decode([*prompt, *ids])
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
