"""A data node's jobs on real token shards, without a second process."""

import json
import mmap
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from decod.data.prepare import PrepareConfig, prepare
from decod.protocol.core.jobs import Propose
from decod.worker.arena import Arena
from decod.worker.jobs import JobRunner
from tests.support.devices import on_devices

torch.set_num_threads(1)

SIZE = 2 * 8 * 16 * 4
MB = {"iteration": 1, "data_node_index": 0, "index": 0}


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

    def ask(kind: str, **fields: Any) -> dict[str, Any]:
        return runner.run({"job": 0, "kind": kind, **fields})

    model = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    batch = {"sequence_length": 8, "microbatch_size": 2}
    others: dict[str, Any] = {"stages": {"num_relay_stages": 1}, "optimizer": {}, "reduction": {}}
    data = {"seed": 1, "data_dir": str(corpus)}
    assert ask("configure", model=model, batch=batch, **others, **data)["ok"]
    assert ask("build", stage_index=0)["ok"]
    shard.unlink()
    refused = ask("embed", mb=MB, outputs=[output])
    assert refused["error"]["code"] == "E-DAT-021"
    assert refused["blocks"] == [[0, 0, len(content)]]
    give = {"shard_index": 0, "offset": 0, "inputs": [given]}
    assert ask("give_block", **give)["error"]["code"] == "E-DAT-022"
    os.pwrite(descriptor, content, given["offset"])
    assert ask("give_block", **give)["ok"]
    assert ask("embed", mb=MB, outputs=[output])["ok"]
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

    def ask(kind: str, **fields: Any) -> dict[str, Any]:
        reply = runner.run({"job": 0, "kind": kind, **fields})
        assert reply["ok"], reply
        result: dict[str, Any] = reply["result"]
        return result

    ask(
        "configure",
        model={"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1},
        stages={"num_relay_stages": 1},
        batch={"sequence_length": 8, "microbatch_size": 2},
        optimizer={},
        reduction={},
        seed=1,
        device=device,
        data_dir=str(tmp_path / "corpus"),
    )
    ask("build", stage_index=0)
    ask("embed", mb=MB, outputs=regions[:1])
    # The relay is left out: what it would send is as good as what it got.
    found = ask("head", mb=MB, inputs=regions[:1], outputs=regions[1:2])
    assert found["num_tokens"] == 16
    assert 0 < found["loss"] < 2 * np.log(257)
    # The arena may grow while it is mapped.
    os.ftruncate(descriptor, 1 << 20)
    grown = {"offset": 1 << 18, "num_bytes": SIZE}
    ask("head", mb=MB, inputs=regions[:1], outputs=[grown])
    data = os.pread(descriptor, SIZE, 1 << 18)
    assert data == os.pread(descriptor, SIZE, SIZE)
    assert any(data)
    ask("embed_backward", mb=MB, inputs=regions[1:2])
    ask("measure", num_repeats=1)
    assert ask("square", iteration=1, weights_total=1) == {"square_sum": 0.0}, "nothing is clipped"
    job = asdict(Propose(iteration=1, num_parts=0, weights_total=1))
    ask("propose", **json.loads(json.dumps(job)))
    ask("commit", iteration=1)
    os.close(descriptor)
