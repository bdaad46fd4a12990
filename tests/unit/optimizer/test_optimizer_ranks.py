"""A host with two processes of torch.distributed: they are one to the others."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import DEADLINE_S, FakeNode, alone
from tests.support.loops import (
    BATCH,
    adamw,
    backward,
    batches,
    collaborate,
    falling,
    flat,
    make_model,
    values,
)
from tests.support.ranked_loop import NUM_STEPS, averaging

ROOT = Path(__file__).resolve().parents[3]


Ran = Callable[[str], tuple[list[Tensor], list[dict[str, Any]]]]


def donated() -> tuple[CollaborativeOptimizer, dict[str, Any]]:
    """A host, and a copy of its state for both ranks to load."""
    donor, node = make_model(seed=99), FakeNode()
    optimizer = collaborate(node, adamw(donor.parameters()), scheduler=falling)
    node.send("copy_state", request=1)
    state = node.expect("state")
    return optimizer, {key: state[key] for key in ("path", "description", "round")}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What both ranks of a host have come to in some mode: parameters, and what they say."""
    folder = tmp_path_factory.mktemp("ranks")
    donor, state = donated()
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranked_loop", str(rank), str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(3 * DEADLINE_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        donor.close()

    def result(mode: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
        paths = [folder / f"{mode}-{rank}" for rank in range(2)]
        found = [load_file(path.with_suffix(".safetensors"))["values"] for path in paths]
        texts = [path.with_suffix(".json").read_text(encoding="utf-8") for path in paths]
        return found, [json.loads(text) for text in texts]

    return result


def run_one(policy: Any, **settings: Any) -> tuple[nn.Module, float]:
    model = make_model()
    with collaborate(
        FakeNode(policy), adamw(model.parameters()), scheduler=falling, **settings
    ) as optimizer:
        for batch in batches(NUM_STEPS):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
        return model, float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("mode", "policy", "num_rounds"),
    [
        ("alone", alone(BATCH), NUM_STEPS),
        ("local-alone", alone(BATCH), NUM_STEPS),
        ("average", averaging, NUM_STEPS // 2),
        ("local", averaging, NUM_STEPS // 2),
    ],
)
def test_two_ranks_equal_one_process(ran: Ran, mode: str, policy: Any, num_rounds: int) -> None:
    found, said = ran(mode)
    model, rate = run_one(policy, use_local_updates=mode.startswith("local"))
    assert said == [{"round": num_rounds, "lr": rate}] * 2
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], flat(values(model)), rtol=1e-9, atol=1e-12)


def test_both_ranks_load_a_state(ran: Ran) -> None:
    found, _ = ran("load")
    for each in found:
        assert torch.equal(each, flat(values(make_model(seed=99))))


def test_a_dead_node_ends_both_ranks(ran: Ran) -> None:
    _, said = ran("dead")
    assert [each["error"] for each in said] == ["E-RUN-041", "E-RUN-043"]
