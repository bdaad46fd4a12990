"""Replay a scenario and print its trace: `python -m decod.sim --seed 7 --relays 8 --stages 2`."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from decod.errors import ConfigError
from decod.protocol.flows.registry import ROUTINGS
from decod.sim.elections import election_storm
from decod.sim.invariants import InvariantViolation
from decod.sim.scenario import (
    OPTIONS,
    PART_OPTIONS,
    SYNC_OPTIONS,
    Cut,
    HostFault,
    Scenario,
    sync_of,
)
from decod.sim.simulation import Result, Simulation
from decod.sim.storm import servers_storm, storm_scenario

_STORMS: dict[str, Callable[[int], Scenario]] = {
    "storm": storm_scenario,
    "elections": election_storm,
    "servers_storm": servers_storm,
}
"""Options that take the seed of a run in bad weather, and what draws it."""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0 all committed, 1 an invariant was violated, 3 bad options."""
    try:
        scenario, quiet = _parsed(arguments)
        simulation = Simulation(scenario)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    try:
        result = simulation.run()
    except InvariantViolation as violation:
        _show(simulation.trace.lines if not quiet else [])
        print(f"violation: {violation}", file=sys.stderr)  # noqa: T201
        return 1
    _show([*([] if quiet else result.trace), summary(result)])
    return 0


def summary(result: Result) -> str:
    """Return a one-line summary of a run."""
    return (
        f"iterations={result.num_iterations} duration_s={result.duration_s:.1f}"
        f" events={result.num_events} control_mean={result.num_control_mean:.1f}"
        f" control_max={result.num_control_max} bulk={result.num_bulk}"
        f" stored_peak_bytes={result.stored_peak_bytes}"
    )


def _parsed(arguments: list[str] | None) -> tuple[Scenario, bool]:
    parser = argparse.ArgumentParser(prog="python -m decod.sim", description=__doc__)
    default = Scenario()
    for name, option in OPTIONS.items():
        value = getattr(default, name)
        parser.add_argument(option, dest=name, type=type(value), default=value)
    for name, option in SYNC_OPTIONS.items():
        value = getattr(default.sync, name)
        kind = int if isinstance(value, bool) else type(value)
        parser.add_argument(option, dest=f"sync.{name}", type=kind, default=value)
    for (part, name), option in PART_OPTIONS.items():
        value = getattr(getattr(default, part), name)
        known = [*ROUTINGS] if name == "routing" else None
        parser.add_argument(
            option, dest=f"{part}.{name}", type=type(value), default=value, choices=known
        )
    parser.add_argument("--fault", dest="faults", action="append", default=[])
    parser.add_argument("--cut", dest="cuts", action="append", default=[])
    parser.add_argument("--calm-s", type=float, help="when all faults are over")
    parser.add_argument("--quiet", action="store_true", help="only the summary, no trace")
    parser.add_argument("--storm", type=int, help="seed of a run in bad weather, for all the rest")
    parser.add_argument("--elections", type=int, help="likewise, of one whose leaders are struck")
    parser.add_argument("--servers-storm", type=int, help="likewise, of one with servers")
    parsed: dict[str, Any] = vars(parser.parse_args(arguments))
    quiet = bool(parsed.pop("quiet"))
    drawn = {name: parsed.pop(name) for name in _STORMS}
    for name, seed in drawn.items():
        if seed is not None:
            return _STORMS[name](seed), quiet
    faults = tuple(HostFault.parse(text) for text in parsed.pop("faults"))
    cuts = tuple(Cut.parse(text) for text in parsed.pop("cuts"))
    parts = default.parts_with({key: parsed.pop(".".join(key)) for key in PART_OPTIONS})
    sync = sync_of(**{name: parsed.pop(f"sync.{name}") for name in SYNC_OPTIONS})
    return Scenario(**parsed, **parts, sync=sync, faults=faults, cuts=cuts), quiet


def _show(lines: list[str]) -> None:
    for line in lines:
        print(line)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
