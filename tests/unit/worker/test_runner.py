"""A real compute process, driven over a socket pair and a memory file."""

import json
import math
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decod.devices import device_named
from decod.ids import MicrobatchId
from decod.process import LEAVE_SIGNALS
from decod.protocol.core import jobs
from decod.protocol.core.average_spec import AverageSpec
from decod.protocol.core.job_codec import fields_of
from decod.protocol.core.jobs import Configure, DoNothing
from decod.run.model_config import ModelConfig
from decod.run.run_config import RunConfig
from decod.run.stages_config import StagesConfig
from decod.run.training_config import (
    ActivationCompression,
    ActivationsConfig,
    BatchConfig,
    OptimizerConfig,
)
from decod.train.executor import StageExecutor, StageReport
from decod.train.executor_config import ExecutorConfig
from tests.support.devices import ACCELERATOR, DEFAULT_DEVICE, DEVICES, IS_FAKE
from tests.support.raw_compute import Node

MODEL = {"vocab_size": 19, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
BATCH = {"sequence_length": 8, "microbatch_size": 2}
OPTIMIZER = {"lr": 1.0, "clip_norm": 0.125}
CONFIGURE: dict[str, Any] = {
    "model": MODEL,
    "stages": {"num_relay_stages": 1},
    "batch": BATCH,
    "optimizer": OPTIMIZER,
    "reduction": {"wire_dtype": "float32"},
    "seed": 7,
    "device": DEFAULT_DEVICE,
    "num_threads": 1,
    "data_dir": None,
    "init_dir": None,
}
SIZE = 2 * 8 * 16 * 4
SNAPSHOT = jobs.Snapshot(with_optimizer=True)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def node(device: str) -> Iterator[Node]:
    """A process that computes on the device."""
    node = Node()
    facts = node.configure(CONFIGURE, device=device)
    assert facts["torch"] == torch.__version__
    assert facts["memory_bytes"] > 0
    assert facts["device"] == device
    yield node
    assert node.close() == (0, b"")


def local_executor(
    device: str, activations: ActivationsConfig | None = None
) -> tuple[StageExecutor, StageReport]:
    config = ExecutorConfig(
        run=RunConfig(
            model=ModelConfig(**MODEL),
            stages=StagesConfig(num_relay_stages=1),
            batch=BatchConfig(**BATCH),
            optimizer=OptimizerConfig(**OPTIMIZER),
            activations=activations or ActivationsConfig(),
            seed=7,
        ),
        device=device,
    )
    executor = StageExecutor(config)
    return executor, executor.build(1)


MB = MicrobatchId(1, 0, 0)


def test_an_iteration_in_the_process_equals_one_here(node: Node, device: str) -> None:
    """To the last bit: on CUDA, that is what two processes on one device compute."""
    torch.set_num_threads(1)
    executor, report = local_executor(device)
    built = node.result(jobs.Build(1))
    assert built.parameter_hash == report.hash
    assert built.activation_bytes == SIZE
    hidden = np.random.default_rng(0).standard_normal((2, 8, 16), dtype=np.float32)
    gradient = np.random.default_rng(1).standard_normal((2, 8, 16), dtype=np.float32)
    inputs, output = [node.write(0, hidden)], {"offset": 65536, "num_bytes": SIZE}

    node.result(jobs.Forward(MB), inputs, [output])
    expected = executor.passes.forward(MB, torch.from_numpy(hidden))
    np.testing.assert_array_equal(node.read(output), expected.cpu().numpy().ravel())

    # The input's memory may be used again at once: backward must not depend on it.
    inputs = [node.write(0, gradient)]
    node.result(jobs.Backward(MB), inputs, [output])
    expected = executor.passes.backward(MB, torch.from_numpy(gradient))
    np.testing.assert_array_equal(node.read(output), expected.cpu().numpy().ravel())

    # Two parts of the gradient, each reduced over a roster of one.
    num_parameters = built.num_parameters
    sizes = [num_parameters - num_parameters // 2, num_parameters // 2]
    parts = [{"offset": index * 262144, "num_bytes": 4 * size} for index, size in enumerate(sizes)]
    node.result(jobs.Gather(1, 2), outputs=parts)
    squares = [
        node.result(jobs.Reduce(k, 2, (2,)), [part], [part]).square_sum
        for k, part in enumerate(parts)
    ]
    alone = node.result(jobs.Square(1, weights_total=2)).square_sum
    assert alone == executor.square_sum(executor.own_mean(2))
    assert sum(squares) == pytest.approx(alone, rel=1e-12)
    assert alone > OPTIMIZER["clip_norm"] ** 2
    norm = math.sqrt(alone)
    job = jobs.Propose(1, num_parts=2, weights_total=2, gradient_norm=norm)
    proposed = node.result(job, parts)
    digest = executor.propose(1, [], weights_total=2, gradient_norm=norm)
    assert proposed == jobs.Proposed(digest, metrics=(("learning_rate", 1.0),))
    node.result(jobs.CommitStep(1))

    size = node.result(SNAPSHOT)
    assert size.iteration == 1
    blob = {"offset": 0, "num_bytes": size.num_bytes}
    described = node.result(SNAPSHOT, outputs=[blob])
    assert replace(described, manifest="") == size
    node.result(jobs.Build(1))
    loaded = node.result(jobs.Load(1, (described.manifest,)), [blob])
    assert loaded == jobs.Built(digest)


def test_a_large_state_is_loaded_from_a_file(node: Node, tmp_path: Path) -> None:
    node.result(jobs.Build(1))
    size = node.result(SNAPSHOT)
    blob = {"offset": 0, "num_bytes": size.num_bytes}
    described = node.result(SNAPSHOT, outputs=[blob])
    load = jobs.Load(1, (described.manifest,))
    loaded = node.result(load, [blob])
    path = tmp_path / "state"
    in_file = blob | {"path": str(path)}
    refused = node.ask(load, [in_file])["error"]
    assert refused["why"] == "No such file or directory"
    path.write_bytes(node.read(blob, np.uint8).tobytes())
    assert node.result(load, [in_file]) == loaded


@pytest.mark.parametrize(
    ("compression", "size", "bad"),
    [
        # A scale of 0 for the second token; NaN as the first element.
        ("int8", 2 * 8 * (16 + 4), (4, np.zeros(1, dtype=np.float32))),
        ("int4", 2 * 16 * 2 + 2 * 8 * (2 + 8), (64, np.zeros(1, dtype=np.uint16))),
        ("bf16", 2 * 8 * 16 * 2, (0, np.full(1, 0x7FC0, dtype=np.uint16))),
    ],
)
def test_compressed_activations_come_and_go_as_bytes(
    device: str, compression: str, size: int, bad: tuple[int, np.ndarray]
) -> None:
    torch.set_num_threads(1)
    activations = ActivationsConfig(compression=ActivationCompression(compression))
    executor, report = local_executor(device, activations)
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = torch.randn((2, 2, 8, 16), generator=generator).to(device)
    entry, back = (executor.passes._codec.sent(x, "") for x in (hidden, gradient))
    forward = executor.passes.forward(MB, entry)
    backward = executor.passes.backward(MB, back)
    with closing(Node()) as node:
        node.configure(CONFIGURE, device=device, activations={"compression": compression})
        built = node.result(jobs.Build(1))
        assert built.activation_bytes == report.activation_bytes == size
        output = {"offset": 65536, "num_bytes": size}
        for job, given, expected in (
            (jobs.Forward(MB), entry, forward),
            (jobs.Backward(MB), back, backward),
        ):
            region = node.write(0, given.cpu().numpy())
            node.write(bad[0], bad[1])
            refusal = node.ask(job, [region], [output])["error"]
            assert refusal["code"] == "E-TRN-003"
            assert "received" in refusal["what"]
            node.write(0, given.cpu().numpy())
            short = node.ask(job, [{**region, "num_bytes": size - 1}], [output])
            assert short["error"]["code"] == "E-TRN-008"
            node.result(job, [region], [output])
            np.testing.assert_array_equal(node.read(output, np.uint8), expected.cpu().numpy())


def test_auto_falls_back_to_the_cpu_where_no_device_is_visible() -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with closing(Node(**hidden)) as node:
        facts = node.configure(CONFIGURE, device="auto")
    assert facts["device"] == "cpu"
    assert facts["device_text"].startswith("CPU (")
    assert facts["memory_bytes"] > 0


@pytest.mark.gpu
def test_auto_takes_the_first_device_that_is_visible() -> None:
    with closing(Node()) as node:
        facts = node.configure(CONFIGURE, device="auto")
        built = node.result(jobs.Build(1))
    assert facts["device"] == ACCELERATOR
    device = device_named(ACCELERATOR)
    assert facts["device_text"] == f"{ACCELERATOR}, {device.title}"
    assert 0 < facts["memory_bytes"] <= torch.accelerator.get_memory_info(ACCELERATOR)[1]
    assert built.parameter_hash == local_executor("cpu")[1].hash


@pytest.mark.skipif(not IS_FAKE, reason="DECOD_TEST_DEVICE is not fake:0")
def test_a_device_without_float64_has_the_state_on_the_host() -> None:
    with closing(Node(DECOD_TEST_NO_FLOAT64="1")) as node:
        node.configure(CONFIGURE, device=ACCELERATOR)
        test_an_iteration_in_the_process_equals_one_here(node, ACCELERATOR)
    with closing(Node(DECOD_TEST_NO_FLOAT64="1")) as node:
        wide = CONFIGURE | {"model": MODEL | {"dtype": "float64"}, "device": ACCELERATOR}
        refused = node.ask(jobs.Configure(wide))["error"]
        assert refused["code"] == "E-HW-025"


def test_a_bad_job_is_answered_and_the_next_one_runs(node: Node) -> None:
    """Mistakes of any kind are replies with a code, never the end of the process."""
    node.result(jobs.Build(1))
    here = {"offset": 0, "num_bytes": SIZE}
    nan = node.write(0, np.full(SIZE // 4, np.nan, dtype=np.float32))
    forward, unnamed = jobs.Forward(MB), {"microbatch": {}}
    far = [{"offset": 1 << 30, "num_bytes": SIZE}]
    propose = fields_of(jobs.Propose(1, 0, 1))
    replies = [
        node.ask_raw("dance"),
        node.ask_raw("do_nothing", {"more": 1}),
        node.ask(forward, [nan], [here]),
        node.ask(jobs.Inspect(MB, is_gradient=False), [nan]),
        node.ask(jobs.Inspect(MB, is_gradient=False), [{**here, "num_bytes": SIZE - 4}]),
        node.ask(forward, [here]),
        node.ask_raw("forward", unnamed, [here], [here]),
        node.ask(jobs.Backward(replace(MB, index=5)), [here], [here]),
        node.ask(forward, far, [here]),
        node.ask(forward, [{"offset": -1, "num_bytes": SIZE}], [here]),
        node.ask(jobs.CommitStep(1)),
        node.ask(jobs.Square(1, weights_total=0)),
        node.ask_raw("propose", {**propose, "gradient_norm": None}),
        node.ask(jobs.Propose(1, 0, 1, gradient_norm=-1.0)),
        node.ask_raw("propose", {**propose, "spec": {"fragment": 1}}),
        node.ask(jobs.Propose(1, 0, 1, spec=AverageSpec(fragment=2))),
        node.ask(jobs.Embed(MB), outputs=[here]),
        node.ask(jobs.Build(9)),
        node.ask(jobs.Load(1, (json.dumps({"tensors": [{}], "chunks": ""}),)), [here]),
        node.ask(Configure({"model": {"hidden_sise": 3}, "seed": 1})),
        node.ask(Configure({**CONFIGURE, "device": "cuda:99"})),
    ]
    assert [reply["error"]["code"] for reply in replies] == [
        "E-INT-003", "E-INT-003", "E-TRN-003", "E-TRN-003", "E-TRN-008", "E-INT-003", "E-INT-003",
        "E-TRN-005", "E-TRN-008", "E-TRN-008", "E-TRN-007", "E-INT-003", "E-INT-003", "E-INT-003",
        "E-INT-003", "E-TRN-001", "E-TRN-001", "E-TRN-001", "E-CKP-002", "E-CFG-001", "E-HW-002",
    ]  # fmt: skip
    assert node.result(DoNothing()) == jobs.Nothing()


def test_measuring_leaves_no_trace(node: Node) -> None:
    before = node.result(jobs.Build(1))
    found = node.result(jobs.Measure())
    assert found.forward_s > 0
    assert found.backward_s > 0
    assert found.microbatch_memory_bytes >= SIZE
    parts = [{"offset": 0, "num_bytes": 4 * before.num_parameters}]
    node.result(jobs.Gather(1, 1), outputs=parts)
    assert not node.read(parts[0]).any()


@pytest.mark.parametrize("number", LEAVE_SIGNALS)
def test_signals_that_end_a_session_are_left_to_the_node(
    node: Node, number: signal.Signals
) -> None:
    node.process.send_signal(number)
    assert node.result(DoNothing()) == jobs.Nothing()


@pytest.mark.parametrize("line", [b"{\n", b"[1]\n", b"x" * (1 << 20) + b"\n"])
def test_a_broken_line_is_answered_and_ends_the_loop(line: bytes) -> None:
    """What follows a broken line cannot be trusted to begin a message."""
    from decod.worker.device import Arena
    from decod.worker.job_methods import JobRunner
    from decod.worker.runner import serve

    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/zero", "rb") as nothing:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        sent = 0
        ours.setblocking(False)
        while sent < len(line) and select.select([], [ours], [], 0)[1]:
            sent += ours.send(line[sent:])
        ours.shutdown(socket.SHUT_WR)
        assert serve(theirs, JobRunner(Arena(nothing.fileno()))) == 1
        assert json.loads(ours.recv(1 << 16))["error"]["code"] == "E-INT-003"
