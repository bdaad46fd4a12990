"""The node process of a loop: how it is started, refuses, ends and misbehaves."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR as Cosine
from torch.optim.lr_scheduler import StepLR

import decod.optimizer.node_link
from decod.errors import ConfigError, DecodError, NotRunningError, TrainingError
from decod.optimizer.optimizer import CollaborativeOptimizer
from tests.support.fake_node import DEADLINE_S, FakeNode, alone
from tests.support.loops import (
    BATCH,
    adamw,
    backward,
    batches,
    collaborate,
    falling,
    make_model,
    sgd,
)

REGION = {"offset": 0, "num_bytes": 66 * 8}
ROOT = Path(__file__).resolve().parents[3]


def test_the_loop_says_what_it_trains() -> None:
    node, model = FakeNode(), make_model(torch.float32)
    with collaborate(
        node, adamw(model.parameters()), name="attic", share=64, compression="int8"
    ) as optimizer:
        assert optimizer.join_string == "decod1-v-fake"
        assert optimizer.num_peers == 1
    hello = node.hello
    assert set(hello) == {
        *("kind", "version", "settings", "num_elements", "wide", "shapes", "fingerprint"),
        *("state_hash", "round", "device"),
    }
    assert (hello["num_elements"], hello["wide"], hello["round"]) == (66, "float32", 0)
    assert hello["shapes"] == [[7, 5], [7], [3, 7], [3]]
    assert hello["settings"]["compression"] == "int8"
    assert hello["settings"]["share"] == 64
    assert hello["settings"]["join"] is None
    assert node.expect("bye") == {"kind": "bye"}


@pytest.mark.parametrize(
    "other",
    [
        lambda model: (sgd(model.parameters()), {}),
        lambda model: (torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1), {}),
        lambda model: (adamw(list(model.parameters())[:2]), {}),
        lambda model: (adamw(model.double().parameters()), {}),
        lambda model: (adamw(model.parameters()), {"use_local_updates": True}),
        lambda model: (adamw(model.parameters()), {"scheduler": None}),
        lambda model: (adamw(model.parameters()), {"scheduler": lambda own: StepLR(own, 1)}),
        lambda model: (
            adamw(model.parameters()),
            {"scheduler": lambda own: Cosine(own, 9)},
        ),
    ],
)
def test_other_scripts_have_other_fingerprints(other: Any) -> None:
    nodes = [FakeNode() for _ in range(3)]
    makes = [lambda model: (adamw(model.parameters()), {})] * 2 + [other]
    for node, make in zip(nodes, makes, strict=True):
        wrapped, settings = make(make_model(torch.float32))
        collaborate(node, wrapped, **{"scheduler": falling, **settings}).close()
    first, same, different = (node.hello["fingerprint"] for node in nodes)
    assert first == same != different


def test_a_refusal_is_raised_as_the_node_puts_it() -> None:
    words = {"code": "E-NET-010", "what": "port 1 is in use", "why": "nobody hears", "fix": "run"}
    refusal = {**words, "exit_code": 20}
    with pytest.raises(DecodError) as caught:
        collaborate(FakeNode(refusal=refusal), sgd(make_model().parameters()))
    assert str(caught.value) == "E-NET-010 port 1 is in use: nobody hears. Try: run"


def test_a_node_that_dies_ends_the_wait() -> None:
    node, model = FakeNode(lambda node, message: node.end()), make_model()
    with collaborate(node, sgd(model.parameters()), averaging_timeout_s=600.0) as optimizer:
        backward(model, batches(1)[0])
        with pytest.raises(NotRunningError, match="E-RUN-041"):
            optimizer.step()


def test_a_node_that_leaves_its_run_says_why() -> None:
    def answer(node: FakeNode, message: dict[str, Any]) -> None:
        node.send("stopped", reason="banned", state_lost=False)

    model = make_model()
    with collaborate(FakeNode(answer), sgd(model.parameters())) as optimizer:
        backward(model, batches(1)[0])
        with pytest.raises(NotRunningError, match=r"E-RUN-042.*banned"):
            optimizer.step()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "dance"},
        {"kind": "ready", "join_string": "", "fetching": False},
        {
            "kind": "average",
            "round": 1,
            "included": True,
            "region": {"offset": 0, "num_bytes": 528},
        },
        {"kind": "average", "round": 1, "included": False, "region": {"offset": 0, "num_bytes": 8}},
        {"kind": "average", "round": -1, "included": False},
        {"kind": "contribute", "request": 1, "region": {**REGION, "offset": 1 << 40}},
        {"kind": "contribute", "request": 1, "region": {**REGION, "offset": 4}},
        {"kind": "give_back", "region": REGION},
        {"kind": "load_state", "request": 1, "path": 7},
        {"kind": "progress", "peers": "many"},
        {"kind": "alone", "round": "1"},
    ],
)
def test_a_message_that_no_node_sends_is_an_error(fields: dict[str, Any]) -> None:
    model = make_model()
    node = FakeNode(lambda node, message: node.send(**fields))
    with collaborate(node, sgd(model.parameters())) as optimizer:
        backward(model, batches(1)[0])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(TrainingError):
            optimizer.step()
        pairs = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_progress_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(node: FakeNode, message: dict[str, Any]) -> None:
        if message["kind"] == "step":
            facts = {"peers": 3, "samples": 40, "target": 64, "round": 1, "samples_per_s": 12.5}
            node.send("progress", **facts)
            node.go(message)

    model = make_model()
    with collaborate(FakeNode(answer), sgd(model.parameters()), verbose=True) as optimizer:
        backward(model, batches(1)[0])
        optimizer.step()
        assert optimizer.num_peers == 3
    shown = capsys.readouterr().err
    assert shown == "decod: round 1: 40 of 64 samples, 3 hosts, 12.5 samples/s\n"


def test_a_watched_model_tells_where_the_time_goes() -> None:
    node, model = FakeNode(alone(BATCH)), make_model()
    with collaborate(node, sgd(model.parameters())) as optimizer:
        optimizer.watch(model)
        for batch in batches(2):
            backward(model, batch)
            optimizer.step()
    first, second = (each["seconds"] for each in node.kept if each["kind"] == "step")
    assert set(first) == {"data", "forward", "backward", "accumulate"}
    assert set(second) == {*first, "wait", "apply"}
    assert all(value >= 0 for value in second.values())


def test_a_model_that_is_not_watched_tells_the_time_between_steps_as_a_whole() -> None:
    node, model = FakeNode(alone(BATCH)), make_model()
    with collaborate(node, sgd(model.parameters())) as optimizer:
        backward(model, batches(1)[0])
        optimizer.step()
    (seconds,) = (each["seconds"] for each in node.kept if each["kind"] == "step")
    assert set(seconds) == {"unsplit", "accumulate"}


def test_a_closed_optimizer_says_so() -> None:
    model = make_model()
    optimizer = collaborate(FakeNode(alone(BATCH)), sgd(model.parameters()))
    optimizer.close()
    optimizer.close()
    backward(model, batches(1)[0])
    with pytest.raises(ConfigError, match="E-CFG-094"):
        optimizer.step()


def test_the_node_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that ends at once is an error that names its exit code."""
    command = (sys.executable, "-c", "raise SystemExit(7)")
    monkeypatch.setattr(decod.optimizer.node_link, "COMMAND", command)
    with pytest.raises(NotRunningError, match=r"E-RUN-041.*exit code 7"):
        CollaborativeOptimizer(
            sgd(make_model().parameters()), run="r", target_batch_size=4, batch_size_per_step=4
        )


SCRIPT = """
import signal, sys, threading
sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.support.fake_node import FakeNode
from tests.support.loops import backward, batches, collaborate, make_model, sgd

def answer(node, message):
    if message["kind"] == "step":
        node.go(message, "wait")
        print("waits", flush=True)

model = make_model()
optimizer = collaborate(FakeNode(answer), sgd(model.parameters()), averaging_timeout_s=600.0)
backward(model, batches(1)[0])
try:
    optimizer.step()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_wait() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(ROOT)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert process.wait(DEADLINE_S) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    node = FakeNode(alone(BATCH))
    collaborate(node, sgd(make_model().parameters())).close()
    node.thread.join(DEADLINE_S)
    assert threading.active_count() == before


def test_decod_itself_needs_no_torch() -> None:
    code = (
        "import decod, sys; assert 'torch' not in sys.modules; "
        "assert decod.CollaborativeOptimizer.__name__ == 'CollaborativeOptimizer'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
