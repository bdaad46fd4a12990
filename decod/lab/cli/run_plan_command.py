"""`decod run plan`: what each stage of a run takes of its members, and how fast hosts train it.

`decod lab plan run` is the same command.
"""

import copy
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from decod.cli.options import run_file_argument
from decod.cli.printing import json_text
from decod.config.node_config import DEVICES_MAX
from decod.errors import ConfigError
from decod.lab.cli.plan_options import json_option, path_type, seed_option
from decod.texts import counted, size_text

if TYPE_CHECKING:
    from decod.config.needs import StageNeeds
    from decod.lab.planner.organisations.compare import Comparison
    from decod.lab.planner.organisations.forecast import Forecast
    from decod.lab.planner.organisations.run_work import RunProblem
    from decod.run.run_config import RunConfig

_NAMES = ("pipeline", "servers", "diloco", "collaborative")

_COLUMNS = (
    "PARAMETERS",
    "WEIGHTS",
    "OPTIMIZER",
    "LOSS",
    "MICROBATCH",
    "INPUT",
    "MEMORY",
    "DOWNLOAD",
)
_SPREAD_COLUMNS = ("SPREAD", "HOST")

_LEGEND = (
    "OPTIMIZER counts moments, their next values and the gradient. LOSS is the gradient of the"
    " head and the logits of some positions. MICROBATCH is what one takes between its passes,"
    " and INPUT what stays of that with recomputation. MEMORY is the least of the device, with"
    " one microbatch. Each further one adds MICROBATCH, or INPUT with recomputation. DOWNLOAD"
    " is the state that a newcomer fetches, and weights that are not trained."
)
_SPREAD_LEGEND = (
    "These are sizes on each device. SPREAD is MEMORY of a stage that is spread over the devices."
    " HOST is what it then takes of the host's memory. Members spread a stage only if MEMORY"
    " does not fit."
)


_CARDS_GIB = (4, 6, 8, 10, 12, 16, 24, 32, 48, 80)
"""Memory of usual graphics cards."""
_TORCH_GIB = 1
"""Left of it for torch and the system."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """How long an iteration will take on the hosts of a file."""

    forecast: "Forecast"
    num_tokens: int
    """Of an iteration."""
    differs: tuple[str, ...]
    """What the forecast takes to be other than the run file says."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """How every organisation would do on given hosts."""

    comparison: "Comparison"
    answer: dict[str, Any]
    """It, in the form of --json."""
    expected: _Expected | None
    """How the run file's own would do; None if that does not fit."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """What a stage takes of a member."""

    needs: "StageNeeds"
    """Of each device, which holds the whole stage."""
    spread: "StageNeeds | None"
    """The same if the stage is spread over several devices. None: there is one device."""


@click.command("plan")
@run_file_argument("run_path")
@click.option(
    "--hosts",
    "hosts_path",
    metavar="FILE",
    type=path_type,
    help="Predict times on these hosts and links, described as for `decod lab plan servers`; -"
    " reads the standard input.",
)
@click.option(
    "--running",
    "state_dir",
    metavar="STATE_DIR",
    type=click.Path(path_type=Path),
    help="Take hosts and links as the leader with this folder has measured them.",
)
@click.option(
    "--reliable",
    "reliable",
    metavar="NAME",
    multiple=True,
    help="A host that stays, with --running, which cannot know that. May be repeated.",
)
@click.option(
    "--organisation",
    type=click.Choice(_NAMES),
    help="With hosts: look at this one only.",
)
@click.option(
    "--stages",
    "num_stages",
    type=click.IntRange(1, 1000),
    help="With hosts: the number of stages to have.",
)
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With hosts: draw the times and the best layout to this PNG or SVG.",
)
@click.option(
    "--devices",
    "num_devices",
    metavar="N",
    type=click.IntRange(min=1, max=DEVICES_MAX),
    default=1,
    show_default=True,
    help="Show what a member takes of each of N devices of its host, such as --device"
    " cuda:0,cuda:1.",
)
@seed_option
@json_option
def run_plan(
    *,
    run_path: Path,
    plot_path: Path | None,
    num_devices: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what each stage takes of its members, and how fast a run trains on given hosts.

    \b
    Examples:
      decod run plan run.toml
      decod run plan run.toml --hosts hosts.json
      decod run plan run.toml --hosts hosts.json --organisation diloco --json
      decod run plan run.toml --hosts hosts.json --plot plan.svg
      decod run plan run.toml --running ~/.local/state/decod
      decod run plan run.toml --devices 2

    Needs neither the data nor a running node. Memory is the least that a member takes: torch and
    the system need more. With hosts, it predicts how long an iteration takes: for the run file's
    own stages on the best hosts, and for every organisation with its best stages.

    `decod lab plan run` is the same command.
    """
    from decod.config.run_file import load_run_file
    from decod.lab.cli import plan_run_plot, plan_run_view

    _check_options(options, plot_path)
    run = load_run_file(run_path).run
    stages = _stages(run, num_devices)
    found = _compared(run, options)
    answer = _described(run, stages, None if found is None else found.expected)
    if found is not None:
        answer |= found.answer
        if plot_path is not None:
            plan_run_plot.draw_comparison(found.comparison, plot_path)
    if as_json:
        click.echo(json_text(answer))
        return
    _print_stages(run, stages)
    if found is None:
        base = "" if run.trains_all else " --base FOLDER"
        click.echo(f"next: decod run check {run_path}{base}, then decod leader {run_path}{base}")
        return
    if found.expected is not None:
        _print_expected(found.expected)
    click.echo()
    plan_run_view.print_comparison(found.comparison, answer)


def same_command(name: str) -> click.Command:
    """Return `decod run plan` under another name. Its variables are named after that one."""
    other = copy.copy(run_plan)
    other.name, other.params = name, [copy.copy(each) for each in run_plan.params]
    for each in other.params:
        each.envvar = None  # It may have been named already.
    return other


def _check_options(options: dict[str, Any], plot_path: Path | None) -> None:
    from decod.lab.cli import plan_run_plot

    named = [options["hosts_path"], options["state_dir"]]
    if None not in named:
        raise click.UsageError("give either --hosts or --running")
    if options["reliable"] and options["state_dir"] is None:
        raise click.UsageError("--reliable goes with --running: a file of hosts says it itself")
    for option in ("organisation", "num_stages"):
        if options[option] is not None and named == [None, None]:
            spelled = "--stages" if option == "num_stages" else f"--{option}"
            raise click.UsageError(f"{spelled} goes with --hosts or --running")
    if plot_path is not None:
        if named == [None, None]:
            raise click.UsageError("--plot goes with --hosts or --running")
        plan_run_plot.check_plot(plot_path)


def _compared(run: "RunConfig", options: dict[str, Any]) -> _Compared | None:
    """Return the forecasts on the hosts that the operator names; None if he names none.

    Raises:
        ConfigError: The hosts are wrong, or no organisation fits onto them (E-CFG-063).
    """
    from decod.lab.cli import plan_run_view
    from decod.lab.cli.plan_run import ask_hosts, compare_organisations, one_more
    from decod.lab.files.hosts_file import load_run_hosts

    gaps = None
    if options["state_dir"] is not None:
        problem, gaps = ask_hosts(options["state_dir"], run, options["reliable"])
    elif options["hosts_path"] is not None:
        problem = load_run_hosts(options["hosts_path"], run)
    else:
        return None
    comparison = compare_organisations(problem, run, options)
    expected = None
    # Others may fit where the run file's own stages don't.
    with suppress(ConfigError):
        expected = _expected(problem, run, options["seed"])
    answer = plan_run_view.describe(comparison, problem, gaps)
    gains = one_more(problem, run, options, comparison.chosen[0])
    answer["one_more"] = [{"like": name, "gain": round(gain, 4)} for name, gain in gains]
    return _Compared(comparison, answer, expected)


def _stages(run: "RunConfig", num_devices: int) -> list[_Stage]:
    """Return what each stage takes.

    Raises:
        ConfigError: A microbatch has fewer sequences than there are devices (E-CFG-021).
    """
    from decod.config.needs import stage_needs

    run.batch.require_devices(num_devices)
    return [
        _Stage(
            stage_needs(run, index, num_devices),
            stage_needs(run, index, num_devices, sharded=True) if num_devices > 1 else None,
        )
        for index in range(run.stages.num_relay_stages + 1)
    ]


def _expected(problem: "RunProblem", run: "RunConfig", seed: int) -> _Expected:
    """Return the forecast for the run file's own organisation, stages and ways to average.

    Raises:
        ConfigError: The run does not fit onto the hosts (E-CFG-063).
    """
    from decod.lab.cli.plan_run import compare_organisations

    name = "diloco" if run.sync.steps_locally else run.organisation.value
    options = {
        "organisation": name,
        "num_stages": run.stages.num_relay_stages,
        "seed": seed,
    }
    sync = run.sync
    problem = replace(problem, run=replace(problem.run, cut=tuple(map(len, _blocks(run)[1:]))))
    variants = compare_organisations(problem, run, options).variants
    own: dict[str, object] = {
        "sync.every": sync.every,
        "sync.overlap": sync.overlap,
        "sync.compression": sync.compression.value,
        "servers.delay": run.servers.delay,
        "batch.num_data_nodes": run.batch.num_data_nodes,
    }

    def differing(forecast: "Forecast") -> list[str]:
        found = forecast.settings
        return [key for key in own if key in found and found[key] != own[key]]

    best = min(variants, key=lambda each: len(differing(each)))
    differs = tuple(f"{key} = {best.settings[key]}" for key in differing(best))
    return _Expected(best, problem.run.num_tokens, differs)


# --- what is said ---------------------------------------------------------------------------------


def _described(
    run: "RunConfig", stages: list[_Stage], expected: _Expected | None
) -> dict[str, Any]:
    """Return the answer in the form of --json. docs/research/lab.md explains the keys."""
    from decod.lab.cli.plan_run_view import describe_forecast, describe_stages

    forecast = None
    if expected is not None:
        found = expected.forecast
        forecast = describe_forecast(found, expected.num_tokens) | {
            "stages": describe_stages(found),
            "differs": list(expected.differs),
        }
    blocks = _blocks(run)
    return {
        "run": run.name,
        "organisation": run.organisation.value,
        "num_parameters": sum(stage.needs.num_parameters for stage in stages),
        "stages": [
            _described_stage(index, blocks[index], stage) for index, stage in enumerate(stages)
        ],
        "cards": [{"num_volunteers": num, "memory_gib": gib} for gib, num in _cards(run).items()],
        "forecast": forecast,
    }


def _cards(run: "RunConfig") -> dict[int, int]:
    """Return how few volunteers are enough, by the memory of their cards in GiB.

    Each computes one stage, and there are as many stages as volunteers. More memory is named only
    if fewer are enough with it.
    """
    from decod.config.needs import stage_needs
    from decod.run.stages_config import StagesConfig

    needed = dict[int, int]()
    for num in range(1, run.model.num_hidden_layers + 1):
        cut = replace(run, stages=StagesConfig(num_relay_stages=num))
        # The first stage of relays has the most blocks.
        needed[num] = stage_needs(cut, 1).memory_min_bytes
    found = dict[int, int]()
    for gib in _CARDS_GIB:
        room = (gib - _TORCH_GIB) << 30
        enough = min((num for num, num_bytes in needed.items() if num_bytes <= room), default=0)
        if enough and enough < min(found.values(), default=enough + 1):
            found[gib] = enough
    return found


def _cards_text(cards: dict[int, int]) -> str:
    """Return which cards are enough, in a sentence."""
    told = [f"{counted(num, 'volunteer')} with {gib} GiB" for gib, num in cards.items()]
    if not told:
        return f"no card of {_CARDS_GIB[-1]} GiB holds one block in training"
    *most, last = told
    listed = f"{', '.join(most)}, or {last}" if most else last
    return f"enough, with as many relay stages: {listed}. {_TORCH_GIB} GiB is left for torch."


def _described_stage(index: int, blocks: range, stage: _Stage) -> dict[str, Any]:
    needs, spread = stage.needs, stage.spread
    return {
        "stage": index,
        "first_layer": blocks.start if blocks else None,
        "num_layers": len(blocks),
        "num_parameters": needs.num_parameters,
        "weights_bytes": needs.weights_bytes,
        "optimizer_bytes": needs.optimizer_bytes,
        "loss_bytes": needs.loss_bytes,
        "microbatch_bytes": needs.microbatch_bytes,
        "input_bytes": needs.input_bytes,
        "memory_min_bytes": needs.memory_min_bytes,
        "spread_min_bytes": None if spread is None else spread.memory_min_bytes,
        "spread_host_bytes": None if spread is None else spread.host_bytes,
        "download_bytes": needs.state_bytes + needs.base_bytes,
    }


def _blocks(run: "RunConfig") -> list[range]:
    from decod.run.stages_config import stage_blocks

    return list(stage_blocks(run.model, run.stages))


def _print_stages(run: "RunConfig", stages: list[_Stage]) -> None:
    from rich.table import Table

    from decod.cli.status_view import make_console
    from decod.daemon.demands import about

    click.echo(f"{about(run)}, organisation {run.organisation.value}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("STAGE")
    table.add_column("LAYERS", overflow="fold")
    is_spread = stages[0].spread is not None
    for name in (*_COLUMNS, *(_SPREAD_COLUMNS if is_spread else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for index, (blocks, stage) in enumerate(zip(_blocks(run), stages, strict=True)):
        layers = f"{blocks.start} to {blocks.stop - 1}" if blocks else ""
        ends = "embedding, head" if index == 0 else ""
        table.add_row(
            "0 data" if index == 0 else str(index),
            ", ".join(filter(None, (ends, layers))),
            f"{stage.needs.num_parameters:,}",
            *map(size_text, _sizes(stage)),
        )
    make_console().print(table)
    click.echo(_LEGEND)
    click.echo(_cards_text(_cards(run)))
    if is_spread:
        click.echo(_SPREAD_LEGEND)


def _sizes(stage: _Stage) -> list[int]:
    """Return the sizes in a stage's row, as columns name them."""
    needs, spread = stage.needs, stage.spread
    sizes = [
        needs.weights_bytes,
        needs.optimizer_bytes,
        needs.loss_bytes,
        needs.microbatch_bytes,
        needs.input_bytes,
        needs.memory_min_bytes,
        needs.state_bytes + needs.base_bytes,
    ]
    return sizes if spread is None else [*sizes, spread.memory_min_bytes, spread.host_bytes]


def _print_expected(expected: _Expected) -> None:
    from decod.lab.cli.plan_words import bottleneck_text
    from decod.texts import clean_text

    forecast = expected.forecast
    rate = expected.num_tokens / max(1e-9, forecast.iteration_s)
    variant = f" ({forecast.variant})" if forecast.variant else ""
    click.echo(
        f"expected on these hosts: an iteration in {forecast.iteration_s:.3g} s,"
        f" {rate:,.0f} tokens/s, as {forecast.organisation}{variant}"
    )
    waits = bottleneck_text(forecast.bottleneck)
    click.echo(clean_text(f"it waits for {waits}, {forecast.bottleneck.busy_s:.3g} s"))
    for number, stage in enumerate(forecast.stages, start=1):
        hosts = ", ".join(f"{each.host_id} ({each.num_microbatches})" for each in stage.hosts)
        click.echo(clean_text(f"stage {number}: {hosts}", limit=1000))
    if expected.differs:
        click.echo(f"unlike the run file, it takes {', '.join(expected.differs)}")
