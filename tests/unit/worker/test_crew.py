"""Several ranks of a host compute what one does: real compute processes, on CPUs with gloo."""

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from decod import memory_files
from decod.clocks import Stopwatch
from decod.data.prepare import PrepareConfig, prepare
from decod.errors import ConfigError
from decod.ids import MicrobatchId
from decod.protocol.core import jobs
from decod.protocol.core.fingerprints import Sketch, error_of
from decod.protocol.core.jobs import Configure, SetRecompute, SetThreads, SpreadStage
from decod.train.executor import StageExecutor, StageReport
from decod.train.passes import ActivationCodec
from decod.train.standing_out import sketch_of
from decod.worker.configure import divided
from tests.support.polling import wait_for
from tests.support.quick import first_of
from tests.support.raw_compute import DEADLINE_S, Here, Jobs, Node
from tests.support.systems import linux_alone

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

B, T, D = 3, 8, 16
MODEL = {
    "vocab_size": 257,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
CONFIGURE = {
    "model": MODEL | {"dtype": "float64"},
    "stages": {"num_relay_stages": 1, "num_first_blocks": 1},
    "batch": {"sequence_length": T, "microbatch_size": B},
    "optimizer": {"lr": 1e-2, "warmup_iterations": 2, "clip_norm": 0.5},
    "reduction": {},
    "seed": 7,
    "num_threads": 1,
}
TOLERANCE = 1e-9
SKETCH_ERROR_MAX = 1e-6
"""Sums travel as float32."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    prepare(folder / "corpus", [text], PrepareConfig())
    return folder / "corpus"


class Stage:
    """One stage of a run, on the devices of a host."""

    def __init__(self, node: Jobs, index: int, **configuration: Any) -> None:
        self.node = node
        recomputes = configuration.pop("recomputes", False)
        sharded = configuration.pop("sharded", False)
        self.local = "sync" in configuration
        self.facts = node.configure(CONFIGURE, **configuration)
        if sharded:
            node.result(SpreadStage(sharded=True))
        if recomputes:
            node.result(SetRecompute(recompute=True))
        self.built: jobs.Built = node.result(jobs.Build(index))
        self.output = {"offset": 1 << 16, "num_bytes": self.built.activation_bytes}

    @property
    def executor_here(self) -> StageExecutor:
        """Rank 0's."""
        assert isinstance(self.node, Here)
        executor = self.node.runner._configured
        assert executor is not None
        return executor

    def noise(self, seed: int) -> bytes:
        """Return what another stage might send."""
        executor = self.executor_here
        values = torch.from_numpy(np.frombuffer(random_bytes(seed)).copy()).view(B, T, D)
        whole = ActivationCodec(executor.config.whole, Stopwatch())
        places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [*range(T)], [0, 0, 1, 2, 3, 0, 0, 1]])
        sent = whole.sent(values.to(executor.config.dtype), "noise", places)
        return sent.view(torch.uint8).numpy().tobytes()

    def passes(self, job: jobs.Pass, entry: bytes | None = None) -> Any:
        """Return what a pass makes: its result, and the bytes that go on."""
        inputs, outputs = self._regions(job, entry)
        result = self.node.result(job, inputs, outputs)
        return result, self.node.read(self.output, np.uint8).tobytes()

    def refusal(self, job: jobs.Pass, entry: bytes | None = None) -> dict[str, str]:
        error: dict[str, str] = self.node.ask(job, *self._regions(job, entry))["error"]
        return error

    def _regions(self, job: jobs.Pass, entry: bytes | None) -> tuple[list[Any], list[Any]]:
        inputs = []
        if entry is not None:
            inputs = [self.node.write(0, np.frombuffer(entry, np.uint8))]
        return inputs, [] if isinstance(job, jobs.EmbedBackward) else [self.output]

    def step(self, iteration: int, weights_total: int) -> None:
        """Take a step, and check that the sums come together as often as they are asked for."""
        if self.local and iteration < 3:
            self.node.result(jobs.StepLocally(iteration))
            self.node.result(jobs.CommitStep(iteration))
            return
        square = jobs.Square(iteration, weights_total)
        first = self.node.result(square)
        assert self.node.result(square) == first
        norm = first.square_sum**0.5
        self.node.result(jobs.Propose(iteration, 0, weights_total, gradient_norm=norm))
        self.node.result(jobs.CommitStep(iteration))

    def gradients(self) -> np.ndarray:
        """Return the sum of gradients of the stage."""
        region = {"offset": 1 << 17, "num_bytes": 8 * self.built.num_parameters}
        self.node.result(jobs.Gather(1, 1), outputs=[region])
        return self.node.read(region, np.float64)

    def state(self) -> np.ndarray:
        """Return weights and moments."""
        snapshot = jobs.Snapshot(with_optimizer=True)
        region = {"offset": 0, "num_bytes": self.node.result(snapshot).num_bytes}
        self.node.result(snapshot, outputs=[region])
        return self.node.read(region, np.float64)


def mb_of(iteration: int, index: int) -> MicrobatchId:
    return MicrobatchId(iteration, 0, index)


@pytest.fixture(scope="module")
def one() -> Iterator[Here]:
    """One device."""
    with closing(Here()) as here:
        yield here


@pytest.fixture(scope="module")
def two() -> Iterator[Here]:
    """Two ranks: this process, and another one."""
    before = torch.get_num_threads()
    with closing(Here()) as here:
        yield here
    torch.set_num_threads(before)


def learn(
    here: Here, index: int, device: str, corpus: Path, **more: Any
) -> tuple[list[float], list[bytes], np.ndarray]:
    """Return what one stage makes that trains without the other: losses, results, final state."""
    if index == 0:
        more["data_dir"] = str(corpus)
    stage, losses = Stage(here, index, device=device, **more), list[float]()
    made = list[bytes]()
    measured = here.result(jobs.Measure())
    assert measured.microbatch_memory_bytes > 0
    for iteration in (1, 2, 3):
        for each in (0, 1):
            mb = mb_of(iteration, each)
            # What the other stage would send is as good as noise, in the run's format.
            hidden, gradient = stage.noise(each), stage.noise(2 + each)
            if index == 0:
                _, sent = stage.passes(jobs.Embed(mb))
                result, sent_back = stage.passes(jobs.Head(mb), hidden)
                assert result.num_tokens == B * T
                losses.append(result.loss)
                stage.passes(jobs.EmbedBackward(mb), gradient)
            else:
                _, sent = stage.passes(jobs.Forward(mb), hidden)
                _, sent_back = stage.passes(jobs.Backward(mb), gradient)
            made += [sent, sent_back]
        stage.step(iteration, 2)
    return losses, made, stage.state()


GPT2 = {"model": MODEL | {"dtype": "float64", "model_type": "gpt2", "tie_word_embeddings": True}}
DELAY = {"delay": 1}
LOCAL_STEPS = {"sync": {"method": "diloco", "every": 3}}


APART = {"batch": CONFIGURE["batch"] | {"documents": "apart"}}


def coded(compression: str) -> dict[str, Any]:
    return {"activations": {"compression": compression}}


@pytest.mark.parametrize(
    ("index", "sharded", "more"),
    [
        *[(index, False, coded(each)) for index in (0, 1) for each in ("none", "int8", "bf16")],
        *[(0, False, each) for each in (DELAY, LOCAL_STEPS, GPT2)],
        *[(index, True, each) for index in (0, 1) for each in ({}, GPT2, {"recomputes": True})],
        *[(1, False, APART | coded(each)) for each in ("none", "int8", "bf16")],
        *[(index, True, APART) for index in (0, 1)],
        (0, True, DELAY),
        (1, True, LOCAL_STEPS),
    ],
)
def test_two_ranks_learn_what_one_device_learns(
    one: Here, two: Here, corpus: Path, index: int, sharded: bool, more: dict[str, Any]
) -> None:
    """Three sequences, which the ranks divide unequally, in every kind of run."""
    losses, made, state = learn(one, index, "cpu", corpus, **more)
    found, found_made, found_state = learn(two, index, "cpu,cpu", corpus, sharded=sharded, **more)
    np.testing.assert_allclose(found, losses, rtol=TOLERANCE)
    np.testing.assert_allclose(found_state, state, rtol=0, atol=TOLERANCE)
    is_coded = more.get("activations", {}).get("compression", "none") != "none"
    wide, found_wide = (
        np.frombuffer(b"".join(each), np.uint8 if is_coded else np.float64)
        for each in (made, found_made)
    )
    if is_coded:
        # A code may go to the next number where sums differ in their last bits.
        assert np.mean(wide != found_wide) < 0.01
    else:
        np.testing.assert_allclose(found_wide, wide, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_compute_bfloat16_and_again(
    one: Here, two: Here, corpus: Path, sharded: bool
) -> None:
    """Sums are in float32, and the losses of a few steps agree to a percent."""
    narrow = {"model": MODEL | {"dtype": "bfloat16"}}
    losses, *_ = learn(one, 0, "cpu", corpus, **narrow)
    found, *_ = learn(two, 0, "cpu,cpu", corpus, recomputes=True, sharded=sharded, **narrow)
    np.testing.assert_allclose(found, losses, rtol=1e-2)


def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_all(two: Here, corpus: Path) -> None:
    """No rank waits in a collective for one that has given up, and the sum stays as it was."""
    first = Stage(two, 0, device="cpu,cpu", sharded=True, data_dir=str(corpus), **GPT2)
    first.passes(jobs.Embed(mb_of(1, 0)))
    first.passes(jobs.Head(mb_of(1, 0)), random_bytes(0))
    before = first.gradients()
    huge = np.frombuffer(random_bytes(1)).copy()
    # Differences within a position of the last sequence overflow in the norm.
    huge[-D::2], huge[-D + 1 :: 2] = 1.7e308, -1.7e308
    assert first.refusal(jobs.Head(mb_of(1, 1)), huge.tobytes())["code"] == "E-TRN-003"
    np.testing.assert_array_equal(first.gradients(), before)
    first.passes(jobs.Head(mb_of(1, 1)), random_bytes(1))


def test_no_rank_waits_for_one_that_can_not_read_its_tokens(
    two: Here, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have theirs before any of them begins with a pass of a spread stage."""
    first = Stage(two, 0, device="cpu,cpu", sharded=True, data_dir=str(corpus))
    mb = mb_of(1, 0)
    first.passes(jobs.Embed(mb_of(1, 1)))
    with monkeypatch.context() as patched:
        # Of rank 0 alone.
        patched.setattr(first.executor_here.passes, "_source", None)
        assert first.refusal(jobs.Embed(mb))["what"] == "this node has no data"
        assert first.refusal(jobs.Head(mb), random_bytes(0))["what"] == "this node has no data"
    first.passes(jobs.Embed(mb))
    first.passes(jobs.Head(mb), random_bytes(0))
    two.result(jobs.Propose(1, 0, weights_total=1, gradient_norm=1.0))
    assert first.refusal(jobs.Embed(mb_of(2, 0)))["code"] == "E-TRN-004"
    two.result(jobs.Retract())
    first.passes(jobs.Embed(mb_of(2, 0)))


def random_bytes(seed: int, scale: float = 1.0) -> bytes:
    values = np.random.default_rng(seed).standard_normal((B, T, D))
    return (scale * values).tobytes()


def test_what_one_rank_refuses_no_rank_adds_to_its_sum(two: Here) -> None:
    relay = Stage(two, 1, device="cpu,cpu")
    first, second = mb_of(1, 0), mb_of(1, 1)
    relay.passes(jobs.Forward(first), random_bytes(0))
    relay.passes(jobs.Forward(second), random_bytes(1))
    _, sent_back = relay.passes(jobs.Backward(first), random_bytes(2))
    before = relay.gradients()
    bad = np.frombuffer(random_bytes(3)).copy()
    bad[-1] = np.nan
    assert relay.refusal(jobs.Backward(second), bad.tobytes())["code"] == "E-TRN-003"
    np.testing.assert_array_equal(relay.gradients(), before)
    # A repeated pass answers again and adds nothing, and what is not held is no rank's fault.
    relay.passes(jobs.Forward(first), random_bytes(0))
    assert relay.passes(jobs.Backward(first), random_bytes(2))[1] == sent_back
    np.testing.assert_array_equal(relay.gradients(), before)
    assert relay.refusal(jobs.Backward(first), random_bytes(2))["code"] == "E-TRN-005"
    relay.passes(jobs.Backward(second), random_bytes(3))
    assert not np.array_equal(relay.gradients(), before)


def test_no_rank_computes_while_a_step_is_proposed(two: Here) -> None:
    relay = Stage(two, 1, device="cpu,cpu")
    first, second = mb_of(1, 0), mb_of(1, 1)
    for mb in (first, second):
        relay.passes(jobs.Forward(mb), random_bytes(0))
    relay.passes(jobs.Backward(first), random_bytes(1))
    before = relay.gradients()
    two.result(jobs.Propose(1, 0, weights_total=1, gradient_norm=1.0))
    assert relay.refusal(jobs.Backward(second), random_bytes(1))["code"] == "E-TRN-004"
    two.result(jobs.Retract())
    np.testing.assert_array_equal(relay.gradients(), before)
    relay.passes(jobs.Backward(second), random_bytes(1))
    assert not np.array_equal(relay.gradients(), before)


def test_a_pass_that_fails_on_one_rank_fails_as_a_whole(
    two: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, mb = Stage(two, 1, device="cpu,cpu"), mb_of(1, 0)
    passes = relay.executor_here.passes
    with monkeypatch.context() as patched:
        patched.setattr(passes, "forward", lambda *_: passes.read(torch.zeros(1)))
        assert relay.refusal(jobs.Forward(mb), random_bytes(0))["code"] == "E-TRN-002"
    # The other rank has let go of it as well, or it would add to its sum now.
    assert relay.refusal(jobs.Backward(mb), random_bytes(1))["code"] == "E-TRN-005"
    assert not relay.gradients().any()

    small, huge = (np.frombuffer(random_bytes(seed)).copy() for seed in (0, 1))
    # The last row belongs to the other rank. The smaller its input, the larger the gradient of its
    # norm, which overflows here.
    small[-T * D :] *= 1e-9
    huge[-1] = 1.7e308
    relay.passes(jobs.Forward(mb), small.tobytes())
    error = relay.refusal(jobs.Backward(mb), huge.tobytes())
    assert error["code"] == "E-TRN-003"
    assert "rank 1 on cpu" in error["what"]
    square = jobs.Square(1, weights_total=1)
    assert two.ask(square)["error"]["code"] == "E-TRN-006"
    two.result(jobs.Reset())
    relay.passes(jobs.Forward(mb), random_bytes(0))
    relay.passes(jobs.Backward(mb), random_bytes(1))
    assert two.result(square).square_sum > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_audit_and_are_audited(two: Here, sharded: bool) -> None:
    """Rank 0 repeats passes of whole microbatches by itself, or all do where it is spread."""
    relay = Stage(two, 1, device="cpu,cpu", audited=True, sharded=sharded)
    mb, entry, gradient = mb_of(1, 0), random_bytes(0), random_bytes(1)
    _, sent = relay.passes(jobs.Forward(mb), entry)
    _, sent_back = relay.passes(jobs.Backward(mb), gradient)
    content = np.frombuffer(entry + gradient + sent + sent_back, np.uint8)
    size = relay.node.write(0, content)["num_bytes"] // 4
    found = relay.node.result(
        jobs.ReplayPasses(mb, True, True, 1, bytes(16)),
        [{"offset": k * size, "num_bytes": size} for k in range(4)],
    )
    assert max(found.activation_error, found.gradient_error) < SKETCH_ERROR_MAX
    (told,) = found.sketches
    replayed = Sketch.from_bytes(told)
    contributed = sketch_of(torch.from_numpy(relay.gradients().copy()), replayed.seed)
    assert error_of(contributed, replayed) < SKETCH_ERROR_MAX


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cpu,cpu"])
def test_a_data_node_repeats_passes_of_a_stage_that_it_does_not_serve(
    one: Here, two: Here, device: str, whole: bool
) -> None:
    """It has the stage beside its own, until the iteration ends."""
    relay, mb = Stage(one, 1), mb_of(3, 0)
    for iteration in (1, 2):
        relay.passes(jobs.Forward(mb_of(iteration, 0)), random_bytes(5))
        relay.passes(jobs.Backward(mb_of(iteration, 0)), random_bytes(6))
        relay.step(iteration, 1)
    entry, gradient = random_bytes(0), random_bytes(1)
    _, sent = relay.passes(jobs.Forward(mb), entry)
    _, sent_back = relay.passes(jobs.Backward(mb), gradient)
    snapshot = jobs.Snapshot(with_optimizer=whole)
    region = {"offset": 0, "num_bytes": one.result(snapshot).num_bytes}
    manifest = one.result(snapshot, outputs=[region]).manifest
    blob = one.read(region, np.uint8).copy()
    judge = Stage(two, 0, device=device)
    before = judge.state()
    built = two.result(jobs.StandIn(1, 2, manifest, whole), [two.write(0, blob)])
    assert built.parameter_hash == relay.executor_here._built.state.hash
    content = np.frombuffer(entry + gradient + sent + sent_back, np.uint8)
    size = two.write(0, content)["num_bytes"] // 4
    replay = jobs.ReplayPasses(mb, True, True, 1, bytes(16), beside=True)
    inputs = [{"offset": k * size, "num_bytes": size} for k in range(4)]
    found = two.result(replay, inputs)
    assert max(found.activation_error, found.gradient_error) < SKETCH_ERROR_MAX
    turned = [*inputs[:2], inputs[3], inputs[2]]
    found = two.result(replay, turned)
    assert min(found.activation_error, found.gradient_error) > 0.5
    np.testing.assert_array_equal(judge.state(), before)
    two.write(0, content)
    two.result(jobs.Reset())
    refused = two.ask(replay, inputs)
    assert "no other stage" in refused["error"]["what"]


def test_a_node_without_room_for_another_stage_goes_on_with_its_own(
    one: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, build = Stage(one, 1), StageExecutor.build

    def fail(executor: StageExecutor, stage_index: int, **more: Any) -> StageReport:
        build(executor, stage_index, **more)
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(StageExecutor, "build", fail)
    manifest = json.dumps({"tensors": [], "chunks": ""})
    region = {"offset": 0, "num_bytes": 8}
    error = one.ask(jobs.StandIn(0, 0, manifest, with_optimizer=False), [region])["error"]
    assert "no room for another stage" in error["what"]
    assert error["code"] != "E-HW-003"
    relay.passes(jobs.Forward(mb_of(1, 0)), random_bytes(0))


def test_devices_divide_threads_and_memory(two: Here) -> None:
    cap = 64 << 20
    configuration = CONFIGURE | {"num_threads": 5, "memory_max_bytes": cap}
    facts = two.configure(configuration, device="cpu,cpu")
    assert facts["device"] == "cpu,cpu"
    assert facts["device_text"] == "2 devices: CPU; CPU"
    # The cap is less than what is free, and each may use half of it.
    assert facts["memory_bytes"] == cap // 2
    (rank,) = facts["ranks"]
    assert psutil.Process(rank["pid"]).ppid() == os.getpid()
    for process in (psutil.Process(), psutil.Process(rank["pid"])):
        listening = [each for each in process.net_connections() if each.status == "LISTEN"]
        # Some releases of torch listen at IPv6 addresses that stand for IPv4 ones.
        addresses = {each.laddr.ip.removeprefix("::ffff:") for each in listening}
        assert addresses == {"127.0.0.1"}, "nobody else can connect"
    assert torch.get_num_threads() == 2
    two.result(SetThreads(6))
    assert torch.get_num_threads() == 3


def test_more_devices_than_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 devices for microbatches of 3 sequences"):
        divided(CONFIGURE | {"device": "cpu,cpu,cpu,cpu"})


def ranks_of(node: Node) -> list[psutil.Process]:
    return psutil.Process(node.process.pid).children()


@pytest.mark.parametrize("is_idle", first_of([False, True]))
def test_the_end_of_a_rank_ends_the_process_and_it_says_so(is_idle: bool) -> None:
    with closing(Node()) as node:
        relay = Stage(node, 1, device="cpu,cpu,cpu")
        relay.passes(jobs.Forward(mb_of(1, 0)), random_bytes(0))
        relay.passes(jobs.Backward(mb_of(1, 0)), random_bytes(1))
        lost, other = ranks_of(node)
        if not is_idle:
            # It does not take its part in the sum, for which the others wait.
            lost.send_signal(signal.SIGSTOP)
            node.send(jobs.Square(1, weights_total=1))
            assert not select.select([node.socket], [], [], 0.5)[0]
        lost.kill()
        reason = "rank 1 on cpu ended (signal 9), and its sum of gradients is lost"
        assert node.said() == {"ends": reason}
        assert node.process.wait(DEADLINE_S) == 1
        ended(other)


def lock_of(pid: int) -> Path:
    """Return the lock of a process that has made files in shared memory."""
    held = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
    return next(Path(each) for each in held if each.endswith(".lock"))


def test_the_end_of_a_rank_of_a_spread_stage_ends_the_process_in_a_pass() -> None:
    with closing(Node()) as node:
        relay = Stage(node, 1, device="cpu,cpu", sharded=True)
        (lost,) = ranks_of(node)
        lost.send_signal(signal.SIGSTOP)
        region = node.write(0, np.frombuffer(random_bytes(0), np.uint8))
        node.send(jobs.Forward(mb_of(1, 0)), [region], [relay.output])
        assert not select.select([node.socket], [], [], 0.5)[0], "it waits for the rank's weights"
        lost.kill()
        reason = "rank 1 on cpu ended (signal 9), and its sum of gradients is lost"
        assert node.said() == {"ends": reason}
        assert node.process.wait(DEADLINE_S) == 1


def ended(*ranks: psutil.Process) -> None:
    _, alive = psutil.wait_procs(ranks, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.parametrize(
    "is_stopped",
    [pytest.param(True, marks=linux_alone), pytest.param(False, marks=pytest.mark.slow)],
)
def test_no_rank_outlives_the_first(is_stopped: bool) -> None:
    with closing(Node()) as node:
        node.configure(CONFIGURE, device="cpu,cpu,cpu")
        ranks = ranks_of(node)
        assert len(ranks) == 2
        if is_stopped:
            ranks[0].send_signal(signal.SIGSTOP)
        node.process.kill()
        ended(*ranks)


@linux_alone
def test_a_rank_that_stops_while_it_starts_does_not_outlive_the_first() -> None:
    with closing(Node()) as node:
        node.send(Configure({**CONFIGURE, "device": "cpu,cpu"}))
        (rank,) = wait_for(lambda: ranks_of(node), "its process", timeout_s=DEADLINE_S)
        # A second thread waits for the end of the first rank. The first still loads torch.
        wait_for(lambda: rank.num_threads() > 1, "its thread", timeout_s=DEADLINE_S)
        rank.send_signal(signal.SIGSTOP)
        node.process.kill()
        ended(rank)


def test_a_lost_rank_leaves_no_file_behind() -> None:
    with closing(Node()) as node:
        node.configure(CONFIGURE, device="cpu,cpu")
        lock = lock_of(node.process.pid)
        assert memory_files._files_of(lock)
        ranks_of(node)[0].kill()
        assert "rank 1 on cpu ended" in node.said()["ends"]
        assert node.process.wait(DEADLINE_S) == 1
        assert not memory_files._files_of(lock)


def test_ranks_end_with_the_jobs() -> None:
    node = Node()
    node.configure(CONFIGURE, device="cpu,cpu")
    ranks = ranks_of(node)
    assert node.close()[0] == 0
    assert len(ranks) == 1
    assert not ranks[0].is_running()
