"""How long a peer may be silent, from how regular it was."""

import math

import pytest

from decod.protocol.core.messages.membership_messages import SLACK_MAX
from decod.protocol.links.liveness import Accrual


def patience(*gaps_s: float) -> Accrual:
    accrual = Accrual(floor_s=5.0, interval_s=1.0)
    for gap_s in gaps_s:
        accrual.ended(gap_s)
    return accrual


def phi(gaps_s: list[float], silence_s: float) -> float:
    """The definition: minus the logarithm of how likely a longer silence is."""
    mean_s = sum(gaps_s) / len(gaps_s)
    deviation_s = math.sqrt(sum((gap_s - mean_s) ** 2 for gap_s in gaps_s) / len(gaps_s))
    later = math.erfc((silence_s - mean_s) / (deviation_s * math.sqrt(2))) / 2
    return -math.log10(later)


def test_nobody_is_given_less_than_the_fixed_time() -> None:
    assert patience().timeout_s == 5.0
    assert patience(*[1.0] * 200).timeout_s == 5.0
    assert patience(*[1.0, 1.1, 0.9] * 50).slack == 1.0


def test_an_irregular_peer_is_given_the_silence_whose_phi_is_eight() -> None:
    gaps_s = [1.0, 3.0, 2.0, 4.0] * 20
    found = patience(*gaps_s)
    assert found.timeout_s > 5.0
    assert phi(gaps_s, found.timeout_s) == pytest.approx(8.0, abs=0.02)


def test_no_peer_is_given_more_than_a_few_times_the_fixed_time() -> None:
    assert patience(1.0, 500.0, 1.0, 900.0).timeout_s == SLACK_MAX * 5.0


def test_traffic_does_not_make_a_peer_seem_regular() -> None:
    """Many messages in a row are one sign of life."""
    busy = patience(*[1.0, *[0.001] * 50, 4.0] * 40)
    assert busy.timeout_s == patience(*[1.0, 4.0] * 40).timeout_s


def test_a_peer_that_is_regular_again_is_found_soon_again() -> None:
    assert patience(*[8.0] * 10, *[1.0] * 100).slack == 1.0
