"""The experiments of the paper on reliable and unreliable parameter servers: pipelines whose stages
have parameter servers on reliable hosts, and unreliable hosts as their clients.

Table 2 compares the time of a batch in four cases of growing disorder. Figure 2 varies how often
hosts disconnect, figure 4 the number of hosts. Figure 5 asks into how many stages a set of real
hosts should be cut.

- `decod.lab.sim.server_instances` draws the settings and says what is fitted or chosen.
- `decod.lab.sim.rigid` has PipeDream and DAPPLE, `decod.lab.sim.retraining` SWARM and DeDLOC.
- `decod.lab.sim.server_systems` lists all systems, and is the place where decod's own come in.

One number of each model is fitted, so that the fastest of the paper's baselines takes the paper's
time in case 1: 43.5 minutes with ALBERT, 168.9 with Llama. Compare ratios. The baselines are
generous models, often faster than the paper's. Both planners choose plain data parallelism for
ALBERT in cases 1 and 2: its layers share their parameters, so little is averaged.

Figures 2, 4 and 5 are drawings without numbers. There `paper` is None.

Source: "reliable/unreliable parameter-server pipelines" (under review at ICLR 2025), section 4.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from decod.lab.sim import server_instances
from decod.lab.sim.paper import Progress, Row, make_row
from decod.lab.sim.server_instances import FIGURE_5, MODELS, Instance, TrainedModel
from decod.lab.sim.server_systems import SYSTEMS

PAPER: Mapping[str, Mapping[str, tuple[float, float, float, float]]] = {
    "xxlarge": {
        "servers": (56.1, 65.4, 74.8, 82.2),
        "pipedream": (43.5, 66.2, 85.2, 115.7),
        "dapple": (44.3, 55.9, 79.1, 114.6),
        "swarm": (53.7, 62.8, 77.5, 96.8),
    },
    "Llama-33B": {
        "servers": (194.6, 216.7, 243.6, 253.6),
        "pipedream": (170.2, 204.6, 294.7, 369.8),
        "dapple": (168.9, 185.2, 268.5, 356.4),
        "swarm": (248.4, 272.7, 256.1, 292.5),
    },
}
"""Table 2: minutes of a batch in cases 1 to 4, by model and system."""

CASES = (1, 2, 3, 4)

UNRELIABLE_RATIOS = (0.3, 0.6)
DISCONNECT_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
NUM_HOSTS = (16, 24, 32, 48)

_OURS = "servers"
TABLE_2 = (
    "servers",
    "pipeline",
    "pipedream",
    "pipedream once",
    "dapple",
    "dapple once",
    "swarm",
)
_FIRST_ONLY = ("pipeline",)
"""Systems that take a minute or more for an instance: only the first of a setting is simulated."""
_FIGURE_2 = ("servers", "swarm", "dedloc")
_FIGURE_4 = ("servers", "swarm", "dapple", "dapple once")
_FIGURE_5 = ("servers", "swarm")
_PLANNED = "as planned"
"""The setting of figure 5 whose stages decod's planner chooses."""

_Draw = Callable[[int], Instance]
"""Returns a setting's instance of a seed."""

_Times = dict[str, list[float]]
"""Minutes of a batch by system, one value for each seed."""


def table2(
    num_seeds: int,
    progress: Progress,
    *,
    models: Iterable[TrainedModel] = MODELS,
    cases: Iterable[int] = CASES,
    systems: Iterable[str] = TABLE_2,
) -> list[Row]:
    """Return table 2: minutes of a batch by system, and each other system's time relative to ours.

    Only case 4 has losses. So only there `once` differs, and is shown.

    Args:
        num_seeds: Number of instances of each case.
        progress: Called before each instance.
        models: The models to train.
        cases: 1 to 4.
        systems: Names in `decod.lab.sim.server_systems.SYSTEMS`. `pipeline` is simulated for the
            first instance of each case.
    """
    rows: list[Row] = []
    cases, systems = tuple(cases), tuple(systems)
    for model in models:
        for case in cases:
            setting = f"{model.name} case {case}"
            times = _times(
                setting,
                lambda seed, model=model, case=case: server_instances.table2(model, case, seed),  # type: ignore[misc]
                [name for name in systems if case == CASES[-1] or not name.endswith(" once")],
                num_seeds,
                progress,
            )
            printed = {name: values[case - 1] for name, values in PAPER[model.name].items()}
            rows += _compared(setting, times, printed)
    return rows


def figure2(
    num_seeds: int,
    progress: Progress,
    *,
    unreliable_ratios: Iterable[float] = UNRELIABLE_RATIOS,
    disconnect_ratios: Iterable[float] = DISCONNECT_RATIOS,
) -> list[Row]:
    """Return figure 2: minutes of a batch of Llama, by how many hosts are unreliable, and how."""
    rows: list[Row] = []
    disconnect_ratios = tuple(disconnect_ratios)
    for unreliable in unreliable_ratios:
        for disconnect in disconnect_ratios:
            setting = f"{unreliable:.0%}, {disconnect:.0%}"

            def draw(seed: int, pair: tuple[float, float] = (unreliable, disconnect)) -> Instance:
                return server_instances.figure2(*pair, seed)

            rows += _compared(setting, _times(setting, draw, _FIGURE_2, num_seeds, progress), {})
    return rows


def figure4(
    num_seeds: int, progress: Progress, *, num_hosts: Iterable[int] = NUM_HOSTS
) -> list[Row]:
    """Return figure 4: throughput by number of hosts, and how well it grows with their number.

    The scaling efficiency is the throughput of each host relative to that with the first number.
    """
    rows: list[Row] = []
    first: tuple[int, _Times] | None = None
    for num in num_hosts:
        setting = f"{num} hosts"

        def draw(seed: int, num: int = num) -> Instance:
            return server_instances.figure4(num, seed)

        times = _times(setting, draw, _FIGURE_4, num_seeds, progress)
        first = first or (num, times)
        for name, values in times.items():
            rates = [60 / value for value in values]
            rows.append(make_row(setting, name, "batches_per_hour", rates))
            pairs = zip(first[1][name], values, strict=True)
            efficiencies = [begin * first[0] / (value * num) for begin, value in pairs]
            rows.append(make_row(setting, name, "scaling_efficiency", efficiencies))
    return rows


def figure5(
    num_seeds: int, progress: Progress, *, settings: Iterable[str] = (*FIGURE_5, _PLANNED)
) -> list[Row]:
    """Return figure 5: minutes of a batch in the paper's 2, 3 and 4 stages, and in decod's own.

    The paper found 3 to be best.
    """
    rows: list[Row] = []
    for setting in settings:

        def draw(seed: int, setting: str = setting) -> Instance:
            return server_instances.figure5(setting, seed)

        rows += _compared(setting, _times(setting, draw, _FIGURE_5, num_seeds, progress), {})
    return rows


def _times(
    setting: str, draw: _Draw, names: Sequence[str], num_seeds: int, progress: Progress
) -> _Times:
    """Return the minutes of each system."""
    found: _Times = {name: [] for name in names}
    for seed in range(num_seeds):
        progress(f"{setting}, seed {seed}")
        instance = draw(seed)
        for name in names:
            if not (seed and name in _FIRST_ONLY):
                found[name].append(SYSTEMS[name](instance))
    return found


def _compared(setting: str, times: _Times, printed: Mapping[str, float]) -> list[Row]:
    """Return the rows of a setting: minutes, and ratios to our system if it is there."""
    rows: list[Row] = []
    for name, values in times.items():
        system = name.removesuffix(" once")
        rows.append(make_row(setting, name, "min_per_batch", values, printed.get(system)))
        if name != _OURS and _OURS in times:
            pairs = zip(values, times[_OURS], strict=False)  # The first only, of slow systems.
            ratios = [value / ours for value, ours in pairs]
            given = (
                round(printed[system] / printed[_OURS], 3)
                if system in printed and _OURS in printed
                else None
            )
            rows.append(make_row(setting, name, "ratio_to_servers", ratios, given))
    return rows
