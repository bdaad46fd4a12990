"""Bad weather over stages with servers: each microbatch is in one sum, then progress.

`scripts/fuzz_sim.py --servers` runs thousands of these.
"""

import os

import pytest

from decod.sim.__main__ import main
from decod.sim.simulation import Simulation
from decod.sim.storm import servers_storm, weather
from tests.support.mutations import Mutation, notice
from tests.support.servers_mutations import SERVERS_MUTATIONS

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "800")) // 4
_QUICK, _CHUNK = range(6, 16), 50
"""Seeds of the test that is always run, and number of seeds of each slow one. `test_traces.py`
plays those before."""

_LATER = [
    pytest.param(first, min(_CHUNK, NUM_SEEDS - first), marks=pytest.mark.slow)
    for first in range(_QUICK.stop, NUM_SEEDS, _CHUNK)
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("first", "num"), [pytest.param(_QUICK.start, len(_QUICK)), *_LATER])
def test_runs_with_servers_survive_storms_and_then_commit_again(first: int, num: int) -> None:
    failures, tally = weather(range(first, first + num), servers_storm)
    assert not failures, "\n\n".join(failures)
    assert tally["runs that committed all"] > num / 2, tally
    assert tally["iterations mended"] > num / 2, tally


@pytest.mark.parametrize("mutation", SERVERS_MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_safeguard_of_servers_that_is_taken_out_is_missed(mutation: Mutation) -> None:
    """The seed that is known to notice comes first; others are tried if the weather has changed."""
    found = notice(mutation, [mutation.seed, *range(20)])
    assert found is not None, mutation.without


def test_the_seed_of_a_storm_over_servers_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--servers-storm", "3"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:-1] == list(Simulation(servers_storm(3)).run().trace)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1110, id="a gradient comes later than word that the batch is home"),
        pytest.param(20294, id="a client that works on has lost all servers of its stage"),
        pytest.param(161881, id="a mend is lost, and the question for it, too"),
        pytest.param(179597045293175, id="a task reaches a later life, at another stage"),
        pytest.param(179597045293788, id="an output is awaited from who has the gradient"),
    ],
)
def test_what_once_went_wrong_goes_well(seed: int) -> None:
    failures, _ = weather([seed], servers_storm)
    assert not failures, failures
