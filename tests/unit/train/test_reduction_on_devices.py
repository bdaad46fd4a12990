"""Members of a stage on different devices come to the same bits, wherever they vote on them."""

import math

import pytest
import torch

from decod.compression import lowrank
from decod.compression.codecs import decode, encode
from decod.compression.contribution import CodedContribution
from decod.compression.plan import (
    BlockCoding,
    Coding,
    CompressionConfig,
    FloatCoding,
    Method,
    SparseCoding,
    make_plan,
)
from decod.run.training_config import OptimizerConfig
from decod.train.optimizers import OptimizerState, Segment, optimizer_step
from decod.train.reduction import reduce_part
from tests.support.devices import on_devices

SIZE = 5000
SHAPES = ((24,), (40, 24), (24, 64), (9,))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_devices
def test_steps_have_the_bits_of_a_cpu(device: str) -> None:
    """Also where a gradient or its square is too small for a normal float32."""
    weights = {}
    gradients = [drawn(seed, SIZE) * 10.0 ** -(seed * 8) for seed in range(4)]
    segments = [Segment(0, 11, decayed=False), Segment(11, SIZE, decayed=True)]
    for here in ("cpu", device):
        old = OptimizerState(drawn(9, SIZE).to(here), tuple(torch.zeros(2, SIZE, device=here)))
        new = old.empty_like()
        for iteration, gradient in enumerate(gradients, 1):
            optimizer_step(
                old,
                new,
                gradient.to(here),
                segments=segments,
                optimizer=OptimizerConfig(lr=1e-2, warmup_iterations=2),
                iteration=iteration,
            )
            old, new = new, old
        weights[here] = old.weights.cpu()
    assert torch.equal(weights["cpu"], weights[device])


@on_devices
@pytest.mark.parametrize("total", [1, 3, 7, 1000])
def test_means_have_the_bits_of_a_cpu(device: str, total: int) -> None:
    parts = [drawn(seed, SIZE) for seed in range(5)]
    means = [
        reduce_part(parts, weights_total=total, dtype=torch.float32, device=here).cpu()
        for here in ("cpu", device)
    ]
    assert torch.equal(*means)


@on_devices
@pytest.mark.parametrize(
    "coding",
    [
        FloatCoding("float16"),
        FloatCoding("bfloat16"),
        BlockCoding(8),
        BlockCoding(4),
        BlockCoding(4, block_size=48),
        SparseCoding(stride=10, num_kept=20),
    ],
    ids=str,
)
def test_codes_have_the_bits_of_a_cpu(device: str, coding: Coding) -> None:
    values = drawn(1, SIZE)
    coded = encode(coding, values, seed=3)
    assert torch.equal(encode(coding, values.to(device), seed=3).cpu(), coded)
    decoded = decode(coding, coded.to(device), SIZE, seed=3)
    assert torch.equal(decoded.cpu(), decode(coding, coded, SIZE, seed=3))


@on_devices
@pytest.mark.parametrize("method", list(Method))
def test_members_on_two_devices_come_to_one_average(device: str, method: Method) -> None:
    plan = make_plan(SHAPES, CompressionConfig(method=method, rank=6))
    size = sum(map(math.prod, SHAPES))
    members = [
        CodedContribution(plan, drawn(k, size).to(here), drawn(8, size).to(here), seed=5)
        for k, here in enumerate(("cpu", device, device))
    ]
    places = ("cpu", device, device)
    for phase in range(len(plan.phases)):
        parts = [member.parts(phase, len(members)) for member in members]
        means = [
            member.reduce(phase, k, [p[k].to(places[k]) for p in parts], num_parts=3, total=3)
            for k, member in enumerate(members)
        ]
        for member, here in zip(members, places, strict=True):
            member.means.take(phase, [mean.to(here) for mean in means])
    averages = [member.means.average().cpu() for member in members]
    assert all(torch.equal(average, averages[0]) for average in averages)


def shuffled(num: int) -> torch.Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(0))


@on_devices
@pytest.mark.parametrize("rank", [1, 7, 64, 300])
def test_a_product_of_factors_does_not_depend_on_the_order_of_adding(
    device: str, rank: int
) -> None:
    """A device adds in an order of its own. Another order of the columns is another order, too."""
    left, right = drawn(1, 70, rank), drawn(2, 50, rank) * 1e-4
    expected, order = lowrank.agreed_product(left, right), shuffled(rank)
    found = lowrank.agreed_product(left[:, order].to(device), right[:, order].to(device)).cpu()
    assert torch.equal(found, expected)
    exact = left.double() @ right.double().T
    assert float((expected - exact).norm() / exact.norm()) < 1e-5


@on_devices
@pytest.mark.parametrize("weakest", [1.0, 1e-6, 0.0])
def test_orthonormal_columns_do_not_depend_on_the_order_of_adding(
    device: str, weakest: float
) -> None:
    """Also where a direction is little more than the rounding of the others."""
    factor, order = drawn(3, 500, 20), shuffled(500)
    factor[:, 7] = factor[:, 3] + weakest * factor[:, 7]
    factor[:, 8] *= 1e-9
    expected = lowrank.agreed_left(factor)
    found = lowrank.agreed_left(factor[order].to(device)).cpu()
    assert torch.equal(found, expected[order])
    columns = expected.double()
    if weakest == 1.0:
        assert torch.allclose(columns.T @ columns, torch.eye(20).double(), atol=1e-4)
    # Nothing of the space is lost but what is mere noise.
    rest = factor.double() - columns @ (columns.T @ factor.double())
    assert float(rest.norm() / factor.norm()) < 1e-3


def test_a_product_with_zeros_is_zero() -> None:
    assert not lowrank.agreed_product(torch.zeros(3, 2), torch.ones(4, 2)).any()
