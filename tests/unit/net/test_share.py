"""What part of a link a transfer had."""

import pytest

from decod.net.transmission import LinkShare


def test_tensors_that_overlap_share_the_link() -> None:
    """Alone for 1 s, in halves for 2 s, the second alone for 1 s more: 2 s of link for each."""
    share = LinkShare()
    first = share.enter(10.0)
    second = share.enter(11.0)
    assert share.leave(13.0, first) == pytest.approx(2.0)
    assert share.leave(14.0, second) == pytest.approx(2.0)
    alone = share.enter(20.0)
    assert share.leave(21.5, alone) == pytest.approx(1.5)
