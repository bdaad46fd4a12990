"""One compressed average: members agree, and nothing is lost but for later."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decod.compression.contribution import CodedContribution
from decod.compression.plan import (
    CompressionConfig,
    CompressionError,
    Method,
    Plan,
    Shape,
    make_plan,
)

SHAPES: tuple[Shape, ...] = ((24,), (40, 24), (3, 5, 7), (24, 64), (9,))
NUM_ELEMENTS = sum(map(math.prod, SHAPES))
every_method = pytest.mark.parametrize("method", list(Method))
ranks = st.integers(1, 80)
rosters = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
"""Weights of the members."""


def plan_of(method: Method, rank: int = 6) -> Plan:
    return make_plan(SHAPES, CompressionConfig(method=method, rank=rank))


def average(plan: Plan, sums: list[Tensor], total: int, guide: Tensor) -> list[CodedContribution]:
    """Let members average, the first of whom reduces nothing if there are several."""
    members = [CodedContribution(plan, sum_P, guide, seed=5) for sum_P in sums]
    for phase in range(len(plan.phases)):
        parts = [member.parts(phase, len(sums)) for member in members]
        for coded in parts:
            assert [part.numel() for part in coded] == plan.part_bytes(phase, len(sums))
        means = [
            member.reduce(phase, k, [coded[k] for coded in parts], num_parts=len(sums), total=total)
            for k, member in enumerate(members)
        ]
        for member in members:
            member.means.take(phase, means)
    return members


def drawn_sums(weights: list[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUM_ELEMENTS, generator=generator)
    return [w * (common + torch.randn(NUM_ELEMENTS, generator=generator)) for w in weights]


@every_method
@settings(max_examples=30)
@given(rosters, st.integers(0, 99), ranks)
def test_all_members_come_to_the_same_bits_and_nothing_is_lost(
    method: Method, weights: list[int], seed: int, rank: int
) -> None:
    """What the average lacks is in the residuals, up to rounding."""
    plan, total = plan_of(method, rank), sum(weights)
    sums = drawn_sums(weights, seed)
    guide = sum(sums, torch.zeros(NUM_ELEMENTS))
    members = average(plan, sums, total, guide)
    averages = [member.means.average() for member in members]
    assert all(torch.equal(found, averages[0]) for found in averages)
    residual = sum((member.residual() for member in members), torch.zeros(NUM_ELEMENTS))
    rounding = 2e-3 if method.has_factors else 1e-5
    distance = (averages[0] * total + residual - guide).norm() / guide.norm()
    assert float(distance) <= rounding


@every_method
@settings(max_examples=30)
@given(st.integers(0, 99), ranks)
def test_a_residual_is_shorter_than_what_it_is_of(method: Method, seed: int, rank: int) -> None:
    """A contraction: with error feedback, residuals stay bounded."""
    sums = drawn_sums([1], seed)
    (member,) = average(plan_of(method, rank), sums, 1, torch.zeros(NUM_ELEMENTS))
    assert float(member.residual().norm()) <= float(sums[0].norm()) * (1 + 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_compression_the_average_is_exact(dtype: torch.dtype) -> None:
    wide = str(dtype).removeprefix("torch.")
    plan = make_plan(SHAPES, CompressionConfig(), wide=wide)
    sums = [sum_P.to(dtype) for sum_P in drawn_sums([1, 2], 1)]
    members = average(plan, sums, 3, torch.zeros(NUM_ELEMENTS, dtype=dtype))
    assert torch.equal(
        members[1].means.average(), (sums[0] + sums[1]) / torch.tensor(3, dtype=dtype)
    )
    assert not members[0].residual().any()


def test_a_matrix_of_low_rank_travels_almost_whole() -> None:
    """The bound: what is left is the part of lower singular values, here none."""
    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(40, 3, generator=generator), torch.randn(3, 24, generator=generator)
    matrix = (factors[0] @ factors[1]).reshape(-1)
    plan = make_plan([(40, 24)], CompressionConfig(method=Method.LOWRANK, rank=3))
    member = CodedContribution(plan, matrix, torch.zeros(960), seed=1)
    for phase in (0, 1):
        member.means.take(
            phase, [member.reduce(phase, 0, member.parts(phase, 1), num_parts=1, total=1)]
        )
    assert float((member.means.average() - matrix).norm() / matrix.norm()) < 1e-3
    assert 2 < member.means.effective_rank() <= 3.01


def test_the_guide_leads_to_the_strong_directions() -> None:
    """Compare with the best rank-4 approximation, which a singular value decomposition gives."""
    generator = torch.Generator().manual_seed(2)
    left = torch.linalg.qr(torch.randn(40, 24, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(24, 24, generator=generator)).Q
    matrix = left @ torch.diag(0.7 ** torch.arange(24.0)) @ right.T
    best = float((0.7 ** torch.arange(4.0, 24.0)).norm())
    plan = make_plan([(40, 24)], CompressionConfig(method=Method.LOWRANK, rank=4))
    found = list[float]()
    for guide in (torch.zeros(960), matrix.reshape(-1)):
        (member,) = average(plan, [matrix.reshape(-1)], 1, guide)
        found.append(float(member.residual().norm()))
    assert best < found[1] < 1.1 * best < found[0]


@pytest.mark.parametrize("rank", [1, 10, 1000])
def test_factors_are_never_larger_than_their_matrix(rank: int) -> None:
    plan = plan_of(Method.LOWRANK, rank)
    assert plan.num_bytes <= plan_of(Method.NONE).num_bytes
    for shape, found in zip(SHAPES, plan.ranks, strict=True):
        assert found <= min(rank, *shape)


@every_method
def test_a_member_whose_bytes_are_wrong_is_named(method: Method) -> None:
    plan = plan_of(method)
    first, second = (
        CodedContribution(plan, sum_P, torch.zeros(NUM_ELEMENTS), seed=1)
        for sum_P in drawn_sums([1, 1], 3)
    )
    good, short = first.parts(0, 1)[0], second.parts(0, 1)[0][:-1]
    with pytest.raises(CompressionError, match="input 1"):
        first.reduce(0, 0, [good, short], num_parts=1, total=2)
    with pytest.raises(CompressionError, match="bytes"):
        first.means.take(0, [short])


@pytest.mark.parametrize("method", [Method.INT4, Method.LOWRANK_INT4, Method.COCKTAIL])
def test_a_member_whose_scale_is_impossible_is_named(method: Method) -> None:
    plan = plan_of(method)
    member = CodedContribution(plan, drawn_sums([1], 3)[0], torch.zeros(NUM_ELEMENTS), seed=1)
    good = member.parts(0, 1)[0]
    bad = good.clone()
    bad[:4].view(torch.float32)[0] = math.nan
    with pytest.raises(CompressionError, match="input 1: the scale of block 0"):
        member.reduce(0, 0, [good, bad], num_parts=1, total=2)


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"rank": -3}, {"random_ratio": 0.0}, {"top_ratio": 1.5}]
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(CompressionError, match=next(iter(wrong))):
        CompressionConfig(**wrong)  # type: ignore[arg-type]
