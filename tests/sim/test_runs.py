"""Whole runs of the real core in virtual time, over many seeds, without and with faults."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from decod.errors import ConfigError
from decod.protocol.params import ProtocolConfig
from decod.sim.__main__ import main
from decod.sim.network import LinkFaults, Links
from decod.sim.scenario import FaultKind, HostFault, Scenario, random_kill, random_scenario
from decod.sim.simulation import run_scenario

NUM_SEEDS = int(os.environ.get("DECOD_SIM_SEEDS", "100"))
"""Of each kind of run. Nightly checks raise it."""


def enough_for_all(scenario: Scenario) -> Scenario:
    """Let every data node have a flow even when one relay of a stage is gone."""
    return replace(scenario, capacity_min=scenario.num_data_nodes)


@pytest.mark.parametrize("block", range(10))
def test_a_run_without_faults_commits_all_its_iterations(block: int) -> None:
    for seed in range(block, NUM_SEEDS, 10):
        scenario = random_scenario(seed)
        result = run_scenario(scenario)
        assert result.num_iterations == scenario.num_iterations
        assert len(result.losses) == scenario.num_iterations


@pytest.mark.parametrize("block", range(10))
def test_a_run_that_loses_a_relay_commits_all_its_iterations(block: int) -> None:
    """The relay dies at any of its events: joining, training, aggregating, committing, paused."""
    for seed in range(block, NUM_SEEDS, 10):
        scenario = random_scenario(seed)
        scenario = replace(scenario, faults=(random_kill(scenario),))
        result = run_scenario(scenario)
        assert result.stage_lost or result.num_iterations == scenario.num_iterations
