"""Who was set aside may come back after a pause, which doubles."""

import pytest

from decod.protocol.core.effects import EffectSink, Note, Send
from decod.protocol.core.messages.membership_messages import Refuse
from decod.protocol.leadership.suspicions import Cooldowns
from tests.unit.protocol.cast import R1A, R1B, member


def refused(aside: Cooldowns, now_s: float) -> Refuse | None:
    if not aside.refuse(now_s, R1A):
        return None
    (effect,) = aside._out.taken()
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Refuse)
    return effect.message


def test_a_member_that_was_set_aside_is_told_when_it_may_ask_again() -> None:
    aside = Cooldowns(EffectSink())
    aside.put(100.0, member("r1a"), "tensors take too long")
    (note,) = aside._out.taken()
    assert isinstance(note, Note)
    assert dict(note.fields) == {"peer": R1A, "reason": "tensors take too long", "pause_s": 60}
    answer = refused(aside, 110.0)
    assert answer is not None
    assert answer.again_s == pytest.approx(50.0)
    assert answer.reason == "it was set aside for 60 s: tensors take too long"
    assert refused(aside, 160.0) is None
    assert not aside.refuse(110.0, R1B)
    assert aside._out.taken() == []
