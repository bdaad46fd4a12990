"""States that are too large for memory: nodes copy their own into files, and fetch into files."""

import json
import signal
from pathlib import Path

import pytest

from decod.config.run_file import DataSource, render_run_file
from decod.train.checkpoint.store import CheckpointConfig
from tests.support import in_files
from tests.support.cluster import Cluster, run_decod
from tests.support.runs import loss_error, make_run, reference

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def test_copies_in_files_change_nothing(tmp_path: Path, corpus: Path) -> None:
    """Newcomers load them from files of their own, checkpoints verify, and the losses are those of
    one process.
    """
    run = make_run(min_nodes_per_stage=1)
    with Cluster(tmp_path, run, corpus) as cluster:
        source, often = DataSource(path=str(corpus)), CheckpointConfig(every_iterations=3)
        cluster.run_file.write_text(render_run_file(run, source, often), encoding="utf-8")
        leader = cluster.start_leader(program=in_files.PROGRAM)
        for stage in ("1", "2"):
            cluster.start_relay(f"first-{stage}", "--stage", stage, program=in_files.PROGRAM)
        cluster.wait_for_iteration(2)
        late = cluster.start_relay("late", "--stage", "1", program=in_files.PROGRAM)
        cluster.wait_for(lambda: late.iteration, "the newcomer to take part")
        cluster.wait_for_iteration(leader.iteration + 4)
        leader.send(signal.SIGTERM)
        codes = cluster.wait_for_end()
        assert set(codes.values()) == {0}, codes
        for daemon in cluster.daemons:
            assert not list(daemon.state_dir.glob("copies/*"))
            assert (daemon.state_dir / "copies").is_dir()
        assert late.events("state.fetched")
        assert leader.events("checkpoint.written")
        assert not leader.events("checkpoint.failed")
        result = run_decod("checkpoint", "list", "--json", "--state-dir", leader.state_dir)
        rows = json.loads(result.stdout)
        assert rows
        for row in rows:
            iteration, folder = str(row["iteration"]), leader.state_dir
            checked = run_decod("checkpoint", "verify", iteration, "--state-dir", folder)
            assert checked.returncode == 0, checked
        found = leader.losses()
        losses, _ = reference(run, corpus, len(found))
        assert loss_error(found, losses) < 1e-8
