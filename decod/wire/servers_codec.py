"""The codec's table for the messages of `decod.protocol.core.messages.servers`.

**Size.** `Holding` names at most as many microbatches as a batch may have, at some 20 bytes each.
"""

from collections.abc import Mapping

from decod.protocol.core.messages import servers as m
from decod.wire import fields as f
from decod.wire import validate
from decod.wire.averaging_codec import AVERAGING, ITERATION
from decod.wire.v1 import control_pb2 as pb

MICROBATCHES_MAX = 1 << 16

_LEG = f.Choice({m.Leg.ONWARD: pb.LEG_ONWARD, m.Leg.TASK: pb.LEG_TASK, m.Leg.RESULT: pb.LEG_RESULT})
_VIEW: Mapping[str, f.Field] = {"iteration": ITERATION, "path_version": f.ITERATION}
_ONE: Mapping[str, f.Field] = {**_VIEW, "microbatch": f.MICROBATCH}
_MICROBATCHES = f.Repeated(f.MICROBATCH, MICROBATCHES_MAX)


def _verify_holding(message: m.Holding) -> None:
    validate.unique("made", (*message.made, *message.folding, *message.folded))


BODIES: Mapping[str, f.Struct] = {
    "stage_activation": f.Struct(m.StageActivation, {**_ONE, "leg": _LEG}),
    "stage_gradient": f.Struct(m.StageGradient, {**_ONE, "leg": _LEG, "attempt": f.COUNT}),
    "offer": f.Struct(
        m.Offer, {**_VIEW, "window": f.COUNT, "pass_s": f.DURATION, "idle": f.BOOLEAN}
    ),
    "given": f.Struct(m.Given, {**_ONE, "worker": f.NODE_ID}),
    "taken": f.Struct(m.Taken, {**_ONE, "worker": f.NODE_ID}),
    "fetch": f.Struct(m.Fetch, _ONE),
    "folded": f.Struct(m.Folded, _ONE),
    "revoke": f.Struct(m.Revoke, {**_ONE, "attempt": f.COUNT}),
    "unable": f.Struct(m.Unable, {**_ONE, "reason": f.REASON, "attempt": f.COUNT}),
    "missing": f.Struct(m.Missing, _ONE),
    "holding": f.Struct(
        m.Holding,
        {"averaging": AVERAGING, **dict.fromkeys(("made", "folding", "folded"), _MICROBATCHES)},
        _verify_holding,
    ),
    "settled": f.Struct(
        m.Settled, {"averaging": AVERAGING, "num_microbatches": f.COUNT, "digest": f.NUMBER}
    ),
}
