"""What is compiled on CUDA has the results of the operations as they are written."""

from pathlib import Path

import pytest
import torch

from decod.model import fused as fused_module
from decod.model.fused import compiles, fused, require_private
from decod.model.lean import _gated, _gated_backward
from decod.model.loss import _loss_of, _loss_to_gradient
from decod.model.norm import rms_norm_backward, rms_scale, scaled
from decod.model.rotary import rotate
from tests.support.devices import CUDA


def test_a_cpu_runs_what_is_written() -> None:
    calls = []

    @fused
    def doubled(values: torch.Tensor, what: str) -> torch.Tensor:
        calls.append(what)
        return 2 * values

    assert doubled(torch.ones(1 << 20), "large").sum() == 2 << 20
    assert calls == ["large"]
    assert doubled.__name__ == "doubled"


def test_a_compiler_that_does_not_work_is_told_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> object:
        raise RuntimeError("no C compiler\nsecond line")

    monkeypatch.setattr(fused_module, "_compiled", broken)
    compiles.cache_clear()
    try:
        assert not compiles(torch.device("cpu"))
    finally:
        compiles.cache_clear()
    assert "no C compiler: elementwise work runs unfused" in caplog.text


def test_compiled_code_is_only_loaded_from_a_private_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    require_private(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        require_private(tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_results_are_those_of_a_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_module, "_ELEMENTS_MIN", 1)
    assert compiles(torch.device(CUDA)), "this host's torch can't compile: see the log"
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    hidden, gradient, weight = draw(2, 16, 64), draw(2, 16, 64), draw(64)
    gate, up, back = draw(32, 96), draw(32, 96), draw(32, 96)
    logits, targets = draw(32, 50), torch.randint(0, 50, (32, 1), generator=generator)
    heads, cos, sin = draw(2, 16, 4, 16), draw(16, 1, 16), draw(16, 1, 16)

    def results(device: str) -> list[torch.Tensor]:
        def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
            return [tensor.clone().to(device) for tensor in tensors]

        hidden_, gradient_, weight_ = there(hidden, gradient, weight)
        scale = rms_scale(hidden_, 1e-5)
        turned, cosines, sines = there(heads, cos, sin)
        logits_, targets_ = there(logits, targets)
        found = [
            scale,
            scaled(hidden_, scale, weight_),
            *rms_norm_backward(hidden_, scale, weight_, gradient_),
            _gated(*there(gate, up)),
            *_gated_backward(*there(gate, up, back)),
            _loss_of(*there(logits, targets), torch.float32),
            _loss_to_gradient(logits_, targets_, 32, torch.float32),
            logits_,  # The gradient by now.
            rotate(turned, (cosines, sines)),
        ]
        return [tensor.double().cpu() for tensor in found]

    tolerance = {4: 1e-5, 2: 2e-2}[dtype.itemsize]
    for found, expected in zip(results(CUDA), results("cpu"), strict=True):
        assert float((found - expected).norm() / expected.norm()) < tolerance
