"""A leader that begins with a model of the Hub, which a server on loopback plays."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from decod.model.adapter_folder import ADAPTER_CONFIG
from decod.model.weights import WEIGHTS_FILE
from decod.run.adapter_config import AdapterConfig, AdapterKind
from tests.support.cluster import Cluster, run_decod
from tests.support.hub_server import TOKEN, Repository, asked_hub
from tests.support.runs import make_run
from tests.unit.train.test_executor_adapter import folder_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(240)]

NAME = "someone/tiny"
LORA = AdapterConfig(kind=AdapterKind.LORA, rank=4, alpha=8.0)


def test_a_leader_begins_with_a_revision_and_its_adapter_goes_back(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(make_run(min_nodes_per_stage=1), adapter=LORA)
    with (
        asked_hub(tmp_path / "home", monkeypatch) as hub,
        Cluster(tmp_path / "cluster", run, corpus, fork=False) as cluster,
    ):
        commit = hub.add(NAME, folder_of(tmp_path / "base", run.model), is_gated=True)
        hub.repositories[NAME].revisions["v1"] = commit
        hub.repositories[NAME].commit({"config.json": b"{}"}, "of another model")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        leader = cluster.start_leader("--base", f"{NAME}@v1")
        relays = cluster.start_relays(1)
        cluster.wait_for_iteration(2)
        for relay in relays:
            assert relay.events("base.fetched")
            assert not relay.events("base.hub_failed")
        # The leader has fetched the whole file, and each relay a part of it.
        held_bytes = (tmp_path / "base" / WEIGHTS_FILE).stat().st_size
        assert held_bytes < hub.given_bytes[WEIGHTS_FILE]
        pushed = run_decod("push", "someone/tuned", "--state-dir", leader.state_dir, fork=False)
        assert pushed.returncode == 0, pushed
        assert pushed.stdout.endswith(f"is at {hub.url}/someone/tuned\n")
        tuned: Repository = hub.repositories["someone/tuned"]
        settings = json.loads(tuned.files[ADAPTER_CONFIG])
        assert settings["base_model_name_or_path"] == NAME
        assert settings["revision"] == commit
        card = tuned.files["README.md"].decode()
        assert f'base_model: "{NAME}"' in card
        assert f"`{NAME}`, commit `{commit}`" in card
        assert f"run {run.name}, iteration" in tuned.messages[-1]
        report = tmp_path / "report.tar.gz"
        words = ("--state-dir", leader.state_dir, "--output", report, "--yes")
        assert run_decod("bugreport", *words, fork=False).returncode in (0, 8)
        leader.end_run()
        assert leader.wait() == 0
    (checkpoint,) = leader.state_dir.rglob("checkpoints/*/manifest.json")
    assert f"{NAME}@{commit}" in checkpoint.read_text()
    assert TOKEN in hub.tokens
    with tarfile.open(report) as archive:
        archive.extractall(tmp_path / "report", filter="data")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
