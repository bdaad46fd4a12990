"""The product with a weight is the same by any way, on any layout that the blocks have."""

import pytest
import torch

from decod.model import product


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("found", [True, False])
def test_product_is_that_of_matrices(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, found: bool
) -> None:
    if not found:
        monkeypatch.setattr(product, "_has_onednn_linear", lambda: False)
    generator = torch.Generator().manual_seed(0)
    input_NI = torch.randn(33, 24, generator=generator, dtype=torch.float64).to(dtype)
    weight_OI = torch.randn(40, 24, generator=generator, dtype=torch.float64).to(dtype)
    for given, weight in ((input_NI, weight_OI), (input_NI @ weight_OI.T, weight_OI.T)):
        expected = given.double() @ weight.double().T
        result = product.project(given, weight)
        assert result.dtype == dtype
        assert result.is_contiguous()
        error = (result.double() - expected).norm() / expected.norm()
        assert float(error) < {8: 1e-14, 4: 1e-6, 2: 1e-2}[dtype.itemsize]


def test_a_torch_without_the_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(product, "_onednn_linear", missing)
    product._has_onednn_linear.cache_clear()
    try:
        assert not product._has_onednn_linear()
    finally:
        product._has_onednn_linear.cache_clear()
