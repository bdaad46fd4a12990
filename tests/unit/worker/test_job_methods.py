"""Jobs of a compute process without a second process: a data node's on real token shards."""

import json
import mmap
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from decod.data.prepare import PrepareConfig, prepare
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.job_codec import fields_of, kind_of, parsed
from decod.protocol.core.jobs import BaseJob, Configure, GiveBlock
from decod.system import anonymous_file
from decod.worker import configure
from decod.worker.device import Arena
from decod.worker.job_methods import JobRunner
from tests.support.devices import on_devices
from tests.support.raw_compute import message_of

torch.set_num_threads(1)

SIZE = 2 * 8 * 16 * 4
MB = MicrobatchId(1, 0, 0)


class DataNode:
    """The jobs of a data node on a corpus, and the arena that they use."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        text, self.corpus = folder / "text.txt", folder / "corpus"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
        prepare(self.corpus, [text], PrepareConfig())
        self.arena = anonymous_file("arena")
        os.ftruncate(self.arena, 4 * mmap.PAGESIZE)
        self.runner = JobRunner(Arena(self.arena))
        settings = {
            "model": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
            "stages": {"num_relay_stages": 1},
            "batch": {"sequence_length": 8, "microbatch_size": 2},
            "optimizer": {},
            "reduction": {},
            "seed": 1,
            "device": device,
            "data_dir": str(self.corpus),
        }
        self.result(Configure(settings))
        self.result(jobs.Build(0))

    def close(self) -> None:
        os.close(self.arena)

    def ask(self, job: BaseJob, *regions: Sequence[dict[str, int]]) -> dict[str, Any]:
        return self.runner.run(message_of(0, kind_of(type(job)), fields_of(job), *regions))

    def result(self, job: BaseJob, *regions: Sequence[dict[str, int]]) -> Any:
        reply = self.ask(job, *regions)
        assert reply["ok"], reply
        return parsed(job.result, json.loads(json.dumps(reply["result"])))


def test_a_bad_block_is_named_and_can_be_given(tmp_path: Path) -> None:
    """The node process gets it from elsewhere and puts it into the arena."""
    with closing(DataNode(tmp_path)) as node:
        shard = node.corpus / "shard-00000.bin"
        content = shard.read_bytes()
        output = {"offset": 0, "num_bytes": SIZE}
        given = {"offset": 2 * SIZE, "num_bytes": len(content)}
        shard.unlink()
        refused = node.ask(jobs.Embed(MB), [], [output])
        assert refused["error"]["code"] == "E-DAT-021"
        assert refused["blocks"] == [[0, 0, len(content)]]
        give = GiveBlock(0, 0), [given]
        assert node.ask(*give)["error"]["code"] == "E-DAT-022"
        os.pwrite(node.arena, content, given["offset"])
        node.result(*give)
        node.result(jobs.Embed(MB), [], [output])
        assert any(os.pread(node.arena, SIZE, 0))


@on_devices
def test_a_data_node_embeds_its_own_tokens_and_computes_the_loss(
    tmp_path: Path, device: str
) -> None:
    regions = [{"offset": SIZE * index, "num_bytes": SIZE} for index in range(3)]
    with closing(DataNode(tmp_path, device)) as node:
        node.result(jobs.Embed(MB), [], regions[:1])
        # The relay is left out: what it would send is as good as what it got.
        found = node.result(jobs.Head(MB), regions[:1], regions[1:2])
        assert found.num_tokens == 16
        assert 0 < found.loss < 2 * np.log(257)
        # The arena may grow while it is mapped.
        os.ftruncate(node.arena, 1 << 20)
        grown = {"offset": 1 << 18, "num_bytes": SIZE}
        node.result(jobs.Head(MB), regions[:1], [grown])
        data = os.pread(node.arena, SIZE, 1 << 18)
        assert data == os.pread(node.arena, SIZE, SIZE)
        assert any(data)
        node.result(jobs.EmbedBackward(MB), regions[1:2])
        node.result(jobs.Measure())
        squared = node.result(jobs.Square(1, weights_total=1))
        assert squared == jobs.Squared(0.0), "nothing is clipped"
        node.result(jobs.Propose(iteration=1, num_parts=0, weights_total=1))
        node.result(jobs.CommitStep(1))


def test_the_number_of_threads_is_set_between_jobs_and_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(configure, "_USUAL_NUM_THREADS", 2)
    runner = JobRunner(cast("Arena", None))
    given = (3, None, 0, -1, "4", 1.5, True)
    try:
        for number in given:
            message = {"job": 1, "kind": "set_threads", "fields": {"num_threads": number}}
            assert runner.run(message)["ok"] is (number in (3, None) and number is not True)
            assert torch.get_num_threads() == (3 if number == 3 else 2)
    finally:
        torch.set_num_threads(before)
