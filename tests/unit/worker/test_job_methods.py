"""A data node's jobs on real token shards, without a second process."""

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decod.data.prepare import PrepareConfig, prepare
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.job_codec import fields_of, kind_of, parsed
from decod.protocol.core.jobs import BaseJob, Configure, GiveBlock
from decod.worker.arena_view import Arena
from decod.worker.job_methods import JobRunner
from tests.support.devices import on_devices
from tests.support.raw_compute import message_of

torch.set_num_threads(1)

SIZE = 2 * 8 * 16 * 4
MB = MicrobatchId(1, 0, 0)


def test_a_bad_block_is_named_and_can_be_given(tmp_path: Path) -> None:
    """The node process gets it from elsewhere and puts it into the arena."""
    text, corpus = tmp_path / "text.txt", tmp_path / "corpus"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    prepare(corpus, [text], PrepareConfig())
    shard = corpus / "shard-00000.bin"
    content = shard.read_bytes()
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, 4 * mmap.PAGESIZE)
    runner = JobRunner(Arena(descriptor))
    output = {"offset": 0, "num_bytes": SIZE}
    given = {"offset": 2 * SIZE, "num_bytes": len(content)}

    def ask(job: BaseJob, *regions: Sequence[dict[str, int]]) -> dict[str, Any]:
        return runner.run(message_of(0, kind_of(type(job)), fields_of(job), *regions))

    model = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    batch = {"sequence_length": 8, "microbatch_size": 2}
    others: dict[str, Any] = {"stages": {"num_relay_stages": 1}, "optimizer": {}, "reduction": {}}
    data = {"seed": 1, "data_dir": str(corpus)}
    assert ask(Configure({"model": model, "batch": batch, **others, **data}))["ok"]
    assert ask(jobs.Build(0))["ok"]
    shard.unlink()
    refused = ask(jobs.Embed(MB), [], [output])
    assert refused["error"]["code"] == "E-DAT-021"
    assert refused["blocks"] == [[0, 0, len(content)]]
    give = GiveBlock(0, 0), [given]
    assert ask(*give)["error"]["code"] == "E-DAT-022"
    os.pwrite(descriptor, content, given["offset"])
    assert ask(*give)["ok"]
    assert ask(jobs.Embed(MB), [], [output])["ok"]
    assert any(os.pread(descriptor, SIZE, 0))
    os.close(descriptor)


@on_devices
def test_a_data_node_embeds_its_own_tokens_and_computes_the_loss(
    tmp_path: Path, device: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    prepare(tmp_path / "corpus", [text], PrepareConfig())
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    runner = JobRunner(Arena(descriptor))
    regions = [{"offset": SIZE * index, "num_bytes": SIZE} for index in range(3)]

    def ask(job: BaseJob, *regions: Sequence[dict[str, int]]) -> Any:
        reply = runner.run(message_of(0, kind_of(type(job)), fields_of(job), *regions))
        assert reply["ok"], reply
        return parsed(job.result, json.loads(json.dumps(reply["result"])))

    settings = {
        "model": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        "stages": {"num_relay_stages": 1},
        "batch": {"sequence_length": 8, "microbatch_size": 2},
        "optimizer": {},
        "reduction": {},
        "seed": 1,
        "device": device,
        "data_dir": str(tmp_path / "corpus"),
    }
    ask(Configure(settings))
    ask(jobs.Build(0))
    ask(jobs.Embed(MB), [], regions[:1])
    # The relay is left out: what it would send is as good as what it got.
    found = ask(jobs.Head(MB), regions[:1], regions[1:2])
    assert found.num_tokens == 16
    assert 0 < found.loss < 2 * np.log(257)
    # The arena may grow while it is mapped.
    os.ftruncate(descriptor, 1 << 20)
    grown = {"offset": 1 << 18, "num_bytes": SIZE}
    ask(jobs.Head(MB), regions[:1], [grown])
    data = os.pread(descriptor, SIZE, 1 << 18)
    assert data == os.pread(descriptor, SIZE, SIZE)
    assert any(data)
    ask(jobs.EmbedBackward(MB), regions[1:2])
    ask(jobs.Measure())
    assert ask(jobs.Square(1, weights_total=1)) == jobs.Squared(0.0), "nothing is clipped"
    ask(jobs.Propose(iteration=1, num_parts=0, weights_total=1))
    ask(jobs.CommitStep(1))
    os.close(descriptor)
