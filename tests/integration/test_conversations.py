"""A run on conversations: each is read by itself, and the mean is over all answers of the batch."""

import json
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from decod.data.dataset import Dataset
from decod.data.index import TARGET
from decod.data.prepare import PrepareConfig, prepare
from decod.ids import MicrobatchId
from tests.support.chat_models import conversation, write_chat_model
from tests.support.cluster import Cluster
from tests.support.reference import documents_apart, train_on_targets
from tests.support.runs import loss_error, make_run, weight_error

ITERATIONS = 6


@pytest.mark.timeout(240)
def test_two_data_nodes_with_unequal_answers_train_as_one_process(tmp_path: Path) -> None:
    """In float64, with a relay killed in the middle."""
    model = write_chat_model(tmp_path / "model", "chatml")
    draw = random.Random(3)
    lines = [json.dumps({"messages": conversation(draw, "chatml")}) for _ in range(1500)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    corpus = tmp_path / "corpus"
    config = PrepareConfig(tokenizer=str(model), chat=True, sequence_length=32)
    prepare(corpus, [tmp_path / "chat.jsonl"], config)
    run = make_run(num_iterations=ITERATIONS, num_data_nodes=2)
    with Dataset.open(corpus) as dataset:
        run = replace(run, model=replace(run.model, vocab_size=dataset.vocab_size))
        batches = []
        for iteration in range(1, ITERATIONS + 1):
            nums = [0, 0]
            ids = [MicrobatchId(iteration, node, index) for node in range(2) for index in range(8)]
            batch = []
            for mb in ids:
                tokens = dataset.microbatch(mb, run.batch, run.seed)
                marks = dataset.marks(mb, run.batch, run.seed)
                batch += documents_apart(tokens, marks)
                nums[mb.data_node_index] += int((marks[:, 1:] & TARGET).sum())
            batches.append(batch)
            assert nums[0] != nums[1], "unequal"
    losses, weights = train_on_targets(run.model, run.optimizer, run.seed, batches)
    with Cluster(tmp_path / "cluster", run, corpus) as cluster:
        leader = cluster.start_leader("--export", tmp_path / "ours")
        cluster.start_data_node("data-1")
        cluster.start_relays(2)
        cluster.wait_for_iteration(2)
        lost = cluster.daemons[-1]
        lost.send_until_it_ends(signal.SIGKILL)
        ends = cluster.wait_for_end()
        assert {code for name, code in ends.items() if name != lost.name} == {0}
        found = leader.losses()
    assert loss_error(found, losses) < 1e-5, "printed with few digits"
    assert weight_error(tmp_path / "ours", weights) < 1e-12
