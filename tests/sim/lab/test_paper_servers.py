"""The experiments of the paper on parameter servers: settings, cost models, and rows."""

import statistics
from dataclasses import replace
from functools import partial

import pytest

from decod.lab.sim import paper_servers
from decod.lab.sim.paper import Row
from decod.lab.sim.retraining import Retraining, accumulation_s, dedloc_s, parts_s, swarm_s
from decod.lab.sim.server_instances import (
    ALBERT,
    FIGURE_5,
    LLAMA,
    MODELS,
    Instance,
    TrainedModel,
    figure2,
    figure4,
    figure5,
    table2,
)
from decod.lab.sim.server_systems import SYSTEMS, servers_allocation
from tests.support.quick import first_of


def silent(_: str) -> None:
    """Nobody waits."""


def by_key(rows: list[Row]) -> dict[tuple[str, str, str], Row]:
    return {(row.setting, row.policy, row.metric): row for row in rows}


def with_losses(instance: Instance, ratio: float) -> Instance:
    hosts = [h if h.reliable else replace(h, disconnect_ratio=ratio) for h in instance.hosts]
    return replace(instance, hosts=tuple(hosts))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Servers take 50 minutes for everything, the pipeline 60. Returns the seeds of each."""
    seeds: dict[str, list[int]] = {"servers": [], "pipeline": []}

    def takes(name: str, minutes: float, instance: Instance) -> float:
        seeds[name].append(instance.seed)
        return minutes

    monkeypatch.setitem(SYSTEMS, "servers", partial(takes, "servers", 50.0))
    monkeypatch.setitem(SYSTEMS, "pipeline", partial(takes, "pipeline", 60.0))
    return seeds


# --- settings ---------------------------------------------------------------------------------


def test_the_models_have_the_sizes_of_their_papers() -> None:
    assert ALBERT.layer_bytes / 2 == pytest.approx(201e6, rel=0.01)
    assert LLAMA.num_layers * LLAMA.layer_bytes / 2 == pytest.approx(32.1e9, rel=0.01)
    assert {model.num_microbatches for model in MODELS} == {128}


@pytest.mark.parametrize("case", [1, 2, 3, 4])
def test_the_cases_have_the_paper_s_hosts_and_links(case: int) -> None:
    instance = table2(LLAMA, case, seed=3)
    slow = [host for host in instance.hosts if not host.reliable]
    assert (len(instance.hosts), len(slow)) == (16, 8 if case >= 3 else 0)
    assert all(host.forward_s == pytest.approx(1.55 * LLAMA.layer_s) for host in slow)
    sites = {host.name: host.site for host in instance.hosts}
    for (a, b), spec in instance.links.items():
        assert instance.links[b, a] == spec
        if sites[a] == sites[b]:
            assert spec.bandwidth_bytes_per_s == 2e9
        elif case == 2:
            assert 1e9 <= spec.bandwidth_bytes_per_s <= 3e9
            assert 0.01 <= spec.latency_s <= 0.1
        else:
            assert 50 <= spec.bandwidth_bytes_per_s / 125_000 <= 300
            assert 0.1 <= spec.latency_s <= 0.15
    assert instance.churns == (case == 4)


def test_cases_3_and_4_differ_in_their_losses_alone() -> None:
    three, four = (table2(ALBERT, case, seed=5) for case in (3, 4))
    assert three.links == four.links
    assert [three.losses(batch) for batch in range(3)] == [{}] * 3
    numbers = [len(table2(ALBERT, 4, seed).losses(b)) for seed in range(10) for b in range(5)]
    assert statistics.mean(numbers) / 8 == pytest.approx(0.9, abs=0.05)
    assert all(0 <= at < 1 for at in four.losses(0).values())
    assert four.losses(1) == table2(ALBERT, 4, seed=5).losses(1) != four.losses(0)


def test_more_losses_contain_fewer() -> None:
    """Chances are compared with the same draws."""
    few, many = (figure2(0.6, ratio, 0).losses(0) for ratio in (0.3, 0.7))
    assert few.items() <= many.items()


def test_the_settings_of_the_figures() -> None:
    assert [sum(h.reliable for h in figure2(r, 0.5, 0).hosts) for r in (0.3, 0.6)] == [11, 6]
    for num in paper_servers.NUM_HOSTS:
        hosts = figure4(num, 0).hosts
        assert (len(hosts), sum(host.reliable for host in hosts)) == (num, num / 2)
        assert all(0.5 <= h.disconnect_ratio <= 0.9 for h in hosts if not h.reliable)
    for setting in FIGURE_5:
        instance = figure5(setting, 0)
        allocation = servers_allocation(instance)
        assert allocation == instance.allocation
        names = [name for stage in allocation.stages for name in stage]
        assert sorted(names) == sorted(host.name for host in instance.hosts)
        assert sum(not host.reliable for host in instance.hosts) == 4


@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.name))
@pytest.mark.parametrize("case", first_of([4, 3, 2, 1]))
def test_stages_have_reliable_hosts_and_layers_that_fit(model: TrainedModel, case: int) -> None:
    instance = table2(model, case, seed=1)
    allocation = servers_allocation(instance)
    hosts = {host.name: host for host in instance.hosts}
    assert sum(allocation.num_layers) == model.num_layers
    used = [name for stage in allocation.stages for name in stage]
    assert len(used) == len(set(used))
    assert {host.name for host in instance.hosts if host.reliable} <= set(used)
    for names, num_layers in zip(allocation.stages, allocation.num_layers, strict=True):
        assert any(hosts[name].reliable for name in names)
        assert all(num_layers <= instance.num_layers_max(hosts[name]) for name in names)


# --- SWARM and DeDLOC -------------------------------------------------------------------------


def test_parts_are_as_large_as_their_owners_links_are_fast() -> None:
    """In case 1, 16 parts travel at once over links of 2 GB/s, there and back."""
    instance = table2(ALBERT, 1, seed=0)
    names = [host.name for host in instance.hosts]
    assert parts_s(instance, names, 16e9) == pytest.approx(2 * (16e9 / (16 * 2e9) + 0.0001))
    assert parts_s(instance, names[:1], 16e9) == 0.0


def test_swarm_uses_equal_devices_nearly_all_the_time() -> None:
    for model in MODELS:
        instance = table2(model, 1, seed=0)
        work_s = model.num_microbatches * model.num_layers * model.layer_s * 3
        found_s = swarm_s(instance, servers_allocation(instance), num_batches=1)
        assert work_s / 16 < found_s < 1.1 * work_s / 16


def test_swarm_s_batch_ends_when_no_stage_lacks_a_gradient() -> None:
    instance = table2(ALBERT, 4, seed=2)
    cluster = Retraining(instance, servers_allocation(instance), num_batches=2)
    ends: list[tuple[int, int]] = []
    average = cluster._average

    def counted(attempt: int) -> None:
        ends.append((cluster._num_missing(), len(cluster._trips)))
        average(attempt)

    cluster._average = counted  # type: ignore[method-assign]
    figures = cluster.run()
    assert len(figures) == 3
    assert ends[0] == (0, 128)
    # What was lost is trained again, by further microbatches.
    assert ends[-1][0] == 0
    assert ends[-1][1] > 128


@pytest.mark.parametrize("name", first_of(["swarm", "dedloc", "pipedream", "dapple"], 2))
def test_more_losses_take_longer(name: str) -> None:
    calm = table2(LLAMA, 3, seed=4)
    found = [SYSTEMS[name](with_losses(calm, ratio)) for ratio in (0.0, 0.3, 0.9)]
    assert found == sorted(found)
    assert len(set(found)) == 3


def test_dedloc_takes_the_time_of_all_devices_together() -> None:
    instance = table2(LLAMA, 3, seed=0)
    rate = sum(1 / (host.forward_s + host.backward_s) for host in instance.hosts)
    ideal_s = LLAMA.num_microbatches * LLAMA.num_layers / rate
    compute_s = accumulation_s(instance, {})
    # Hosts have only whole microbatches.
    assert ideal_s <= compute_s < 1.1 * ideal_s
    names = [host.name for host in instance.hosts]
    average_s = parts_s(instance, names, LLAMA.num_layers * LLAMA.layer_bytes)
    assert dedloc_s(instance, num_batches=3) == pytest.approx(compute_s + average_s)


def test_what_a_lost_host_has_computed_is_computed_again() -> None:
    instance = table2(ALBERT, 1, seed=0)
    whole_s = accumulation_s(instance, {})
    late = {instance.hosts[0].name: 0.99 * whole_s}
    # Its 7 whole microbatches, and the one under way, are spread over 15 hosts: one more for some.
    assert accumulation_s(instance, late) == pytest.approx(9 / 8 * whole_s)
    assert accumulation_s(instance, {instance.hosts[0].name: whole_s + 1}) == whole_s


def test_decod_s_pipeline_trains_on_an_instance() -> None:
    """A batch of seconds, with losses in case 4, by the protocol of real nodes."""
    small = replace(ALBERT, num_microbatches=16, layer_s=ALBERT.layer_s / 100)
    found = [SYSTEMS["pipeline"](table2(small, case, seed=0)) for case in (1, 4)]
    ideal_min = 16 * small.num_layers * 3 * small.layer_s / 16 / 60
    assert ideal_min < found[0] < found[1]


@pytest.mark.slow
def test_decod_s_servers_train_on_an_instance() -> None:
    """In case 1 they take hardly longer than all devices together would."""
    small = replace(ALBERT, num_microbatches=64, layer_s=ALBERT.layer_s / 10)
    found = [SYSTEMS["servers"](table2(small, case, seed=0)) for case in (1, 4)]
    ideal_min = 64 * small.num_layers * 3 * small.layer_s / 16 / 60
    assert ideal_min < found[0] < 1.2 * ideal_min
    assert found[0] < found[1] < 3 * found[0]


# --- rows -------------------------------------------------------------------------------------


def test_table_2_has_all_systems_and_both_readings_of_a_loss_in_case_4(
    ours: dict[str, list[int]],
) -> None:
    told: list[str] = []
    rows = by_key(paper_servers.table2(2, told.append, models=[ALBERT], cases=[1, 4]))
    assert told[0] == "xxlarge case 1, seed 0"
    assert {policy for setting, policy, _ in rows if setting == "xxlarge case 1"} == {
        "servers",
        "pipeline",
        "pipedream",
        "dapple",
        "swarm",
    }
    assert ("xxlarge case 4", "dapple once", "min_per_batch") in rows
    assert rows["xxlarge case 4", "swarm", "min_per_batch"].paper == 96.8
    assert rows["xxlarge case 4", "pipeline", "ratio_to_servers"].mean == 1.2
    assert ours == {"servers": [0, 1, 0, 1], "pipeline": [0, 0]}, "the pipeline takes long"


@pytest.mark.usefixtures("ours")
def test_ratios_to_ours_stand_beside_the_paper_s() -> None:
    rows = by_key(paper_servers.table2(1, silent, models=[ALBERT], cases=[4]))
    ours = rows["xxlarge case 4", "servers", "min_per_batch"]
    assert (ours.mean, ours.paper) == (50.0, 82.2)
    for policy in ("dapple", "dapple once"):
        ratio = rows["xxlarge case 4", policy, "ratio_to_servers"]
        assert ratio.mean == rows["xxlarge case 4", policy, "min_per_batch"].mean / 50
        assert ratio.paper == round(114.6 / 82.2, 3)
    assert ("xxlarge case 4", "servers", "ratio_to_servers") not in rows


def test_only_the_first_loss_of_a_batch_counts_in_once() -> None:
    instance = table2(ALBERT, 4, seed=0)
    once, each = SYSTEMS["dapple once"](instance), SYSTEMS["dapple"](instance)
    calm = SYSTEMS["dapple"](table2(ALBERT, 3, seed=0))
    assert calm < once < each < 2 * calm


@pytest.mark.usefixtures("ours")
def test_the_figures_have_rows_for_each_setting() -> None:
    rows = paper_servers.figure2(1, silent, unreliable_ratios=[0.6], disconnect_ratios=[0.5])
    assert {(row.setting, row.policy) for row in rows} == {
        ("60%, 50%", policy) for policy in ("servers", "swarm", "dedloc")
    }
    assert {row.paper for row in rows} == {None}
    found = by_key(paper_servers.figure4(1, silent, num_hosts=[16, 24]))
    assert found["16 hosts", "swarm", "scaling_efficiency"].mean == 1.0
    assert found["24 hosts", "servers", "scaling_efficiency"].mean == pytest.approx(16 / 24)
    assert found["24 hosts", "servers", "batches_per_hour"].mean == pytest.approx(60 / 50)
    rows = paper_servers.figure5(1, silent, settings=["3 stages"])
    assert {row.policy for row in rows} == {"servers", "swarm"}
