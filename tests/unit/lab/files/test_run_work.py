"""What a run asks of hosts, counted as planners count it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decod.config.needs import layer_flops, stage_needs
from decod.config.schema import average_size_bytes, count_parameters
from decod.errors import ConfigError
from decod.lab.files.hosts_file import load_run_hosts, run_hosts_of
from decod.lab.files.work_of_run import work_of
from decod.run.model_config import ModelConfig
from decod.run.run_config import Organisation, RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import BatchConfig, ServersConfig

MODEL = ModelConfig(
    num_hidden_layers=6,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=256,
)
BATCH = BatchConfig(sequence_length=32, microbatch_size=2, num_microbatches=8)
RUN = RunConfig(model=MODEL, batch=BATCH, stages=StagesConfig(num_relay_stages=3))
HOSTS = {
    "hosts": [
        {"id": "d1", "kind": "data"},
        {"id": "d2", "kind": "data"},
        {"id": "c", "kind": "unreliable", "tflops": 1, "memory_bytes": 1e9},
    ],
    "links": [
        {"from": "d1", "to": "c", "latency_s": 0.1, "bandwidth_bytes_per_s": 1e6},
        {"from": "d2", "to": "c", "latency_s": 0.1, "bandwidth_bytes_per_s": 1e6},
    ],
}


def test_layers_add_up_to_the_stages_of_the_run() -> None:
    work = work_of(RUN, num_data=2, head_s=0.1, step_s=0.2)
    assert work.num_layers == 6
    assert work.num_microbatches == 16
    assert work.num_tokens == 16 * 64
    outer, *relays = average_size_bytes(RUN)
    assert work.outer.wire_bytes["none"] == outer
    assert work.layer.wire_bytes["none"] == pytest.approx(relays[0] / 2)
    assert 6 * work.layer.state_bytes == pytest.approx(
        sum(stage_needs(RUN, stage).device_bytes for stage in (1, 2, 3))
    )
    assert work.layer.weights_bytes < work.layer.state_bytes < work.layer.local_state_bytes
    assert work.formats == ("none", "int8", "int4"), "factors of rank 64 are no smaller"
    low = replace(RUN, sync=replace(RUN.sync, rank=4))
    assert "lowrank+int4" in work_of(low, num_data=1, head_s=0, step_s=0).formats


def test_operations_are_six_for_each_weight_and_token_and_some_for_attention() -> None:
    weights = 4 * 64 * 64 + 3 * 64 * 96
    assert layer_flops(RUN) == 64 * (6 * weights + 12 * 32 * 64)
    assert count_parameters(MODEL) > 6 * weights


def test_the_run_files_own_organisation_does_not_matter() -> None:
    servers = replace(RUN, organisation=Organisation.SERVERS, servers=ServersConfig(delay=1))
    found = work_of(servers, num_data=1, head_s=0, step_s=0)
    assert found.delays == (1, 0)
    assert replace(found, delays=(0, 1)) == work_of(RUN, num_data=1, head_s=0, step_s=0)


def test_hosts_of_a_run_need_no_reliable_one_and_not_all_links(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(HOSTS))
    problem = load_run_hosts(path, RUN)
    assert problem == run_hosts_of(tmp_path, HOSTS, RUN)
    assert problem.run.num_microbatches == 16
    relay = problem.hosts[2]
    assert relay.speed_layers_per_s == pytest.approx(1e12 / layer_flops(RUN))
    assert relay.memory_bytes == 1e9
    assert problem.base.bandwidths_bytes_per_s[0][1] == 0


def test_mistakes_of_a_node_are_named_like_those_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_hosts_of(tmp_path, {**HOSTS, "hosts": [{"id": "d", "kind": "boss"}]}, RUN)
    assert caught.value.code == "E-CFG-052"
    assert str(tmp_path) in caught.value.what
