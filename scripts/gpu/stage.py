"""Speed of one stage: a relay's jobs beside the same blocks in plain torch, compiled."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from decod.model.shape import stage_shapes
from decod.model.stage import TORCH_DTYPES, Stage, initial_weight
from decod.run.model_config import ModelConfig
from decod.run.stages_config import StagesConfig
from gpu.relay import Relay, run_of
from gpu.result import Measure
from gpu.setting import Setting

RATIO_MIN = 0.95
"""Target: tokens a second of decod, over those of compiled plain torch."""

_PEAKS = {"H100": 989e12, "H200": 989e12}
"""Dense bfloat16 operations a second, by NVIDIA's data sheets."""

_MATRIX_SIZE = 8192


def check_1b(setting: Setting) -> list[Measure]:
    """Measure four blocks of Llama 3.2 1B."""
    return _measure(setting, "1b", setting.pick(4, 2))


def check_8b(setting: Setting) -> list[Measure]:
    """Measure two blocks of Llama 3.1 8B."""
    return _measure(setting, "8b", 2)


def _measure(setting: Setting, name: str, num_blocks: int) -> list[Measure]:
    run = run_of(setting, name, num_blocks, setting.pick(4, 2))
    num_tokens = run.batch.tokens_per_microbatch
    relay = Relay(setting, run)
    plain = _plain(setting, run.model, run.batch.sequence_length)
    entry = relay.view(relay.regions[0]).to(setting.device)
    gradient = relay.view(relay.regions[1]).to(setting.device)

    def of_decod(num: int) -> None:
        for index in range(num):
            relay.forward(index)
            relay.backward(index)
        # A microbatch counts once, so the next ones are those of another iteration.
        relay.executor.reset()

    def of_torch(num: int) -> None:
        for _ in range(num):
            output = plain(entry.detach().requires_grad_())
            torch.autograd.backward([output], [gradient])

    ours, theirs = _rates(setting, (of_decod, of_torch), num_tokens)
    step_s = _step_s(setting, relay)
    relay.close()
    operations = _operations_per_token(run.model, run.batch.sequence_length)
    found = [
        Measure("tokens/s, decod", ours, "tokens/s"),
        Measure("tokens/s, plain torch compiled", theirs, "tokens/s"),
        Measure("decod over plain torch", ours / theirs, "", at_least=RATIO_MIN),
        Measure("model operations, decod", ours * operations / 1e12, "TFLOP/s"),
        Measure("optimizer step with hash", step_s, "s"),
    ]
    peak = _peak(setting)
    found.append(Measure("utilisation, of a large product here", ours * operations / peak))
    known = [rate for title, rate in _PEAKS.items() if title in _title(setting)]
    found += [Measure("utilisation, of the data sheet", ours * operations / rate) for rate in known]
    return found


def _rates(
    setting: Setting, works: tuple[Callable[[int], None], ...], num_tokens: int
) -> list[float]:
    """Return tokens a second of each, in interleaved rounds."""
    num, durations = setting.pick(8, 2), [list[float]() for _ in works]
    for work in works:
        work(2)
    for _ in range(setting.pick(5, 2)):
        for work, of_work in zip(works, durations, strict=True):
            setting.wait()
            start_s = time.perf_counter()
            work(num)
            setting.wait()
            of_work.append(time.perf_counter() - start_s)
    return [num * num_tokens / median(of_work) for of_work in durations]


def _plain(setting: Setting, model: ModelConfig, length: int) -> Callable[[Tensor], Tensor]:
    """Return the relay's blocks as plain modules, compiled, with the same weights."""
    stages, dtype = StagesConfig(num_relay_stages=1), TORCH_DTYPES[model.dtype]
    with torch.device("meta"):
        stage = Stage(model, range(model.num_hidden_layers))
    stage.place(
        {
            name: initial_weight(model, seed=0, name=name, shape=shape).to(setting.device, dtype)
            for name, shape in stage_shapes(model, stages, 1).items()
        }
    )
    with torch.no_grad():
        # The tables of positions are made now, so that nothing in the compiled module changes.
        stage(torch.zeros(1, length, model.hidden_size, device=setting.device, dtype=dtype))
    # Without a GPU the check only tries itself, and compiling for a CPU takes minutes.
    backend = "inductor" if setting.on_cuda else "eager"
    compiled: Callable[[Tensor], Tensor] = torch.compile(stage, backend=backend, dynamic=False)
    return compiled


def _step_s(setting: Setting, relay: Relay) -> float:
    relay.forward(0)
    relay.backward(0)
    relay.step(1)
    relay.forward(0)
    relay.backward(0)
    setting.wait()
    start_s = time.perf_counter()
    relay.step(1)
    return time.perf_counter() - start_s


def _operations_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return operations of both passes: 6 a weight of a matrix, and attention to half a sequence.

    Source: PaLM (arXiv:2204.02311), appendix B; halved, because attention is causal.
    """
    shapes = stage_shapes(model, StagesConfig(num_relay_stages=1), 1).values()
    weights = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    return 6 * weights + 6 * model.num_hidden_layers * model.hidden_size * sequence_length


def _peak(setting: Setting) -> float:
    """Return the operations a second of a large product, in the dtype of the models."""
    size = setting.pick(_MATRIX_SIZE, 64)
    dtype = TORCH_DTYPES[setting.dtype]
    left, right = (torch.randn(size, size, device=setting.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / setting.seconds(lambda: left @ right, 10)


def _title(setting: Setting) -> str:
    return torch.cuda.get_device_name(setting.device) if setting.on_cuda else "CPU"
