"""The product with a weight is the same by any way, on any layout that the blocks have."""

import pytest
import torch

from decod.model import product
from tests.support.devices import on_devices

ERROR_MAX = {8: 1e-14, 4: 1e-6, 2: 1e-2}
"""By the size of an element."""


@on_devices
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("found", [True, False])
def test_product_is_that_of_matrices(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *, found: bool
) -> None:
    if not found:
        monkeypatch.setattr(product, "_has_onednn_linear", lambda: False)
    generator = torch.Generator().manual_seed(0)
    input_NI = torch.randn(33, 24, generator=generator, dtype=torch.float64).to(device, dtype)
    weight_OI = torch.randn(40, 24, generator=generator, dtype=torch.float64).to(device, dtype)
    for given, weight in ((input_NI, weight_OI), (input_NI @ weight_OI.T, weight_OI.T)):
        expected = given.double() @ weight.double().T
        result = product.project(given, weight)
        assert result.dtype == dtype
        assert result.is_contiguous()
        error = (result.double() - expected).norm() / expected.norm()
        assert float(error) < ERROR_MAX[dtype.itemsize]


@on_devices
@pytest.mark.parametrize("narrow", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds_wide", [True, False])
def test_products_are_added_to_sums(
    narrow: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch, *, adds_wide: bool
) -> None:
    if not adds_wide:
        monkeypatch.setattr(product, "_adds_wide", lambda *_: False)
    generator = torch.Generator().manual_seed(0)
    input_NI, gradient_NO, weight_OI, sum_OI, sum_NO = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device, narrow)
        for shape in ((32, 24), (32, 40), (40, 24), (40, 24), (32, 40))
    )
    wide = torch.float64 if narrow == torch.float64 else torch.float32
    total_OI, total_NO = sum_OI.to(wide, copy=True), sum_NO.clone()
    product.add_weight_product(total_OI, gradient_NO, input_NI)
    expected_OI = sum_OI.double() + gradient_NO.double().T @ input_NI.double()
    assert total_OI.dtype == wide
    error = (total_OI.double() - expected_OI).norm() / expected_OI.norm()
    assert float(error) < ERROR_MAX[narrow.itemsize]
    product.add_product(total_NO, input_NI, weight_OI)
    expected_NO = sum_NO.double() + input_NI.double() @ weight_OI.double().T
    error = (total_NO.double() - expected_NO).norm() / expected_NO.norm()
    assert float(error) < ERROR_MAX[narrow.itemsize]


def test_a_torch_without_the_operator_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.setattr(product, "_onednn_linear", missing)
    product._has_onednn_linear.cache_clear()
    try:
        assert not product._has_onednn_linear()
    finally:
        product._has_onednn_linear.cache_clear()
