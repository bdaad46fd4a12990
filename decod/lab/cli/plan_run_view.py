"""What `decod lab plan run` prints: a table for people, and the form of --json."""

import re
from typing import TYPE_CHECKING, Any

from decod.lab.cli.plan_words import bottleneck_text

if TYPE_CHECKING:
    from decod.lab.planner.organisations.compare import Comparison
    from decod.lab.planner.organisations.forecast import Forecast
    from decod.lab.planner.organisations.run_work import RunProblem

_NUM_HOSTS_SHOWN_MAX = 12
"""More hosts of a stage are counted instead of named."""
_CAPACITY_MAX = 4096
_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}\Z")


def describe(
    comparison: "Comparison", problem: "RunProblem", gaps: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the answer in the form of --json. docs/research/lab.md explains the keys.

    Args:
        comparison: The forecasts.
        problem: What was planned.
        gaps: What a running leader has not measured. None: hosts come from a file.
    """
    best, tokens = comparison.chosen[0], problem.run.num_tokens
    exact = comparison.best_exact
    return {
        "best": best.organisation,
        "best_exact": None if exact is None else exact.organisation,
        "lead": _lead(comparison),
        "organisations": [
            describe_forecast(forecast, tokens)
            | {
                "stages": describe_stages(forecast),
                "idle": _idle(forecast, problem),
                "settings": dict(forecast.settings),
                "start": start_lines(forecast, problem),
            }
            for forecast in comparison.chosen
        ],
        "variants": [describe_forecast(forecast, tokens) for forecast in comparison.variants],
        "left_out": dict(comparison.absent),
        "measured": gaps,
    }


def _lead(comparison: "Comparison") -> float | None:
    """Return the next organisation's time over the best one's; None without another."""
    if len(comparison.chosen) < 2:
        return None
    return comparison.chosen[1].iteration_s / comparison.chosen[0].iteration_s


def describe_forecast(forecast: "Forecast", num_tokens: int) -> dict[str, Any]:
    """Return a forecast in the form of --json, without its stages."""
    parts, waits = forecast.parts, forecast.bottleneck
    return {
        "organisation": forecast.organisation,
        "variant": forecast.variant,
        "iteration_s": forecast.iteration_s,
        "tokens_per_s": num_tokens / forecast.iteration_s if forecast.iteration_s else None,
        "compute_s": parts.compute_s,
        "communication_s": parts.communication_s,
        "fill_s": parts.fill_s,
        "aggregation_s": parts.aggregation_s,
        "bottleneck": {
            "kind": waits.kind,
            "stage": waits.stage_index,
            "host": waits.host_id,
            "peer": waits.peer_id,
            "busy_s": waits.busy_s,
        },
        "exact": forecast.exact,
        "remarks": list(forecast.remarks),
    }


def describe_stages(forecast: "Forecast") -> list[dict[str, Any]]:
    """Return the stages of a forecast in the form of --json."""
    return [
        {
            "layers": stage.num_layers,
            "hosts": [
                {"id": host.host_id, "duty": host.duty, "microbatches": host.num_microbatches}
                for host in stage.hosts
            ],
        }
        for stage in forecast.stages
    ]


def _idle(forecast: "Forecast", problem: "RunProblem") -> list[str]:
    used = {host.host_id for stage in forecast.stages for host in stage.hosts}
    return [
        host.host_id
        for host in problem.hosts
        if host.kind.value != "data" and host.host_id not in used
    ]


# --- how to start ---------------------------------------------------------------------------------


def start_lines(forecast: "Forecast", problem: "RunProblem") -> list[dict[str, str]]:
    """Return the host and the command of each node, in the order of starting."""
    if forecast.organisation.value == "collaborative":
        return _script_lines(forecast)
    data = [host.host_id for host in problem.hosts if host.kind.value == "data"]
    lines = [{"host": data[0], "command": "decod leader RUN.toml" + _name_option(data[0])}]
    for host_id in data[1:]:
        command = "decod leader RUN.toml --join DATA_JOINSTRING" + _name_option(host_id)
        lines.append({"host": host_id, "command": command})
    for number, stage in enumerate(forecast.stages, start=1):
        for host in stage.hosts:
            command = f"decod join JOINSTRING --stage {number}"
            match host.duty:
                case "server":
                    command += " --server"
                case "frontal" | "backward":
                    command += f" --server --duty {host.duty}"
            if host.num_microbatches:
                command += f" --capacity {min(host.num_microbatches, _CAPACITY_MAX)}"
            command += _name_option(host.host_id)
            lines.append({"host": host.host_id, "command": command})
    return lines


def _script_lines(forecast: "Forecast") -> list[dict[str, str]]:
    given = ", ".join(f"{key}={value!r}" for key, value in forecast.settings.items())
    hosts = [host.host_id for stage in forecast.stages for host in stage.hosts]
    begins = ['run="my-run"', *["join=JOINSTRING"] * (len(hosts) - 1)]
    return [
        {"host": host, "command": f"decod.CollaborativeOptimizer(optimizer, {begin}, {given}, ...)"}
        for host, begin in zip(hosts, begins, strict=True)
    ]


def _name_option(host_id: str) -> str:
    return f" --name {host_id}" if _NODE_NAME.match(host_id) else ""


# --- for people -----------------------------------------------------------------------------------


def print_comparison(comparison: "Comparison", answer: dict[str, Any]) -> None:
    """Print the table, the reasons, the best layout, and how to start it."""
    from rich.table import Table

    from decod.cli.status_view import make_console
    from decod.texts import clean_text

    console = make_console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ORGANISATION")
    for name in ("ITERATION", "TOKENS/S", "COMPUTE", "LINKS", "FILL", "AGGREGATION"):
        table.add_column(name, justify="right")
    table.add_column("VARIANT", overflow="fold")
    for row in answer["organisations"]:
        table.add_row(
            row["organisation"],
            f"{row['iteration_s']:.4g} s",
            "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}",
            *(
                f"{row[key]:.3g} s"
                for key in ("compute_s", "communication_s", "fill_s", "aggregation_s")
            ),
            row["variant"],
        )
    console.print(table)
    for name, why in answer["left_out"].items():
        console.print(f"{name} is left out: {why}")
    for forecast in comparison.chosen:
        waits = clean_text(
            f"{forecast.organisation} waits for {bottleneck_text(forecast.bottleneck)}"
        )
        console.print(f"{waits}, {forecast.bottleneck.busy_s:.3g} s")
    _print_best(console, comparison, answer)
    for each in answer["one_more"]:
        name = clean_text(each["like"], limit=64)
        console.print(f"one more host like {name}: {each['gain']:.0%} more tokens a second")
    _print_gaps(console, answer["measured"])


def _print_best(console: Any, comparison: "Comparison", answer: dict[str, Any]) -> None:
    from decod.texts import clean_text

    best, row = comparison.chosen[0], answer["organisations"][0]
    lead = answer["lead"]
    gain = (
        "" if lead is None else f", {lead:.2f} times as fast as {comparison.chosen[1].organisation}"
    )
    console.print(f"\nbest: {_titled(best)}{gain}")
    exact = comparison.best_exact
    if exact is not None and not best.exact:
        console.print(
            f"best that steps as one host would: {_titled(exact)}, {exact.iteration_s:.4g} s"
        )
    for remark in best.remarks:
        console.print(f"remark: {remark}")
    for number, stage in enumerate(best.stages, start=1):
        hosts = [f"{host.host_id} ({host.duty}, {host.num_microbatches})" for host in stage.hosts]
        shown = clean_text(", ".join(hosts[:_NUM_HOSTS_SHOWN_MAX]))
        more = len(hosts) - _NUM_HOSTS_SHOWN_MAX
        console.print(
            f"stage {number}, {stage.num_layers} layers: {shown}"
            + (f" and {more} more" if more > 0 else "")
        )
    if row["idle"]:
        console.print(clean_text(f"idle: {' '.join(row['idle'])}"))
    if best.organisation.value != "collaborative":
        console.print("\nkeys of the run file:")
        for key, value in best.settings.items():
            console.print(f"  {key} = {_toml(value)}", highlight=False)
    console.print("\nhow to start it:")
    for line in row["start"]:
        console.print(
            clean_text(f"  {line['host']}: {line['command']}"), highlight=False, soft_wrap=True
        )


def _print_gaps(console: Any, gaps: dict[str, Any] | None) -> None:
    if gaps is None:
        return
    num, known = gaps["num_links"], gaps["num_links_measured"]
    console.print(
        f"\n{known} of {num} links were measured; the other {num - known} count as typical ones. "
        "Memory is not measured and counts as unlimited."
    )
    if unknown := gaps["speeds_unknown"]:
        console.print(f"speed not measured, taken for the median: {', '.join(unknown)}")


def _titled(forecast: "Forecast") -> str:
    return f"{forecast.organisation}" + (f" ({forecast.variant})" if forecast.variant else "")


def _toml(value: str | int | bool) -> str:  # noqa: FBT001
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
