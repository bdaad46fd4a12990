"""Words for what plans say, in all commands of `decod lab plan`."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from decod.lab.planner.bottleneck import Bottleneck

_KIND_WORDS: Final = {
    "device": "the device of {host}",
    "uplink": "the uplink of {host}",
    "downlink": "the downlink of {host}",
    "link": "the link from {host} to {peer}",
    "head": "the head at the data nodes",
    "way": "the way of a microbatch through all stages",
    "workers": "the workers of stage {stage}",
    "memory": "the microbatches that {stage} can hold",
    "step": "the step and the parameters of stage {stage}",
    "average": "the average, at {host}",
}


def bottleneck_text(bottleneck: "Bottleneck") -> str:
    """Return what an iteration waits for, in words. Stages count from 1."""
    index = bottleneck.stage_index
    stage = "" if index is None else str(index + 1)
    if bottleneck.kind == "memory":
        stage = f"stage {stage}" if stage else "a stage"
    return _KIND_WORDS[bottleneck.kind].format(
        host=bottleneck.host_id, peer=bottleneck.peer_id, stage=stage
    )
