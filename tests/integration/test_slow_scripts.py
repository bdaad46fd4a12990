"""Training scripts with a bottleneck that a test has built in: `decod analyse` names it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_analysis import analysed
from tests.support.scripts import Scripts
from tests.support.training_script import Script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

BATCH = 4
ROUNDS = 10
"""That are analysed. Those before them begin with one script, and with cold processes."""

WIDE = 700
"""Of the hidden layer: 4 MB of parameters in float64."""


def script(target_steps: int, *, step_s: float = 0.02, **fields: Any) -> Script:
    """Return a script that averages after so many steps of all together."""
    settings = {"target_batch_size": target_steps * BATCH, "batch_size_per_step": BATCH}
    return Script(settings={**settings, "verbose": False}, step_s=step_s, **fields)


def train(folder: Path, *scripts: Script) -> dict[str, Any]:
    """Train with scripts until all have recorded enough rounds; return the report."""
    folder.mkdir()
    with Scripts(folder, scripts[0]) as group:
        first = group.start(replace(scripts[0], peer=0), run="test", name="first").wait_joined()
        others = [
            group.join(first, replace(each, peer=k + 1), name=f"other-{k + 1}")
            for k, each in enumerate(scripts[1:])
        ]
        for each in group.all:
            each.wait_joined()
        first.wait_for(lambda: first.status()["num_peers"] == len(scripts), "all peers")
        for each in group.all:
            each.train()
        for each in group.all:
            each.wait_for_round(first.round + ROUNDS + 3)
        for each in (*others, first):
            each.leave()
            assert each.wait() == 0, each.tail()
    return analysed(folder, "--rounds", str(ROUNDS))


SLOW_DATA = script(8, data_s=0.1)
SLOW_STEPS = script(8, step_s=0.1)
LATE = script(4, node_late_s=0.1)
LATE_SELDOM = script(16, node_late_s=0.1)
FAST_LINK = script(16, hidden=WIDE)


def slow_link(fast: Script) -> Script:
    return replace(fast, settings={**fast.settings, "upload_max_mbit": 32})


SLOW_LINK, SELDOM = slow_link(FAST_LINK), slow_link(script(64, hidden=WIDE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slow", "cause", "what", "changed"),
    [
        ([SLOW_DATA] * 2, "data", "load data ahead", [replace(SLOW_DATA, data_s=0.0)] * 2),
        ([SLOW_STEPS] * 2, "compute", "have 4 peers", [SLOW_STEPS] * 4),
        ([SLOW_LINK] * 2, "averaging", "set target_batch_size=256", [SELDOM] * 2),
        ([LATE] * 2, "matchmaking", "set target_batch_size=64", [LATE_SELDOM] * 2),
        ([FAST_LINK, FAST_LINK, SLOW_LINK], "peer", "give other-2 a faster", [FAST_LINK] * 3),
    ],
    ids=["data", "compute", "averaging", "matchmaking", "peer"],
)
def test_a_bottleneck_is_named_and_its_removal_gains_what_was_predicted(
    tmp_path: Path, slow: list[Script], cause: str, what: str, changed: list[Script]
) -> None:
    before = train(tmp_path / "before", *slow)
    assert before["main_cause"] == cause, before
    (change,) = [
        each
        for each in before["changes"]
        if each["what"].startswith(what) and "use_local_updates" not in each["what"]
    ]
    after = train(tmp_path / "after", *changed)
    assert after["samples_per_s"] > 1.3 * before["samples_per_s"]
    # All scripts share this machine's processors with other tests.
    assert change["samples_per_s"] == pytest.approx(after["samples_per_s"], rel=0.5), before
