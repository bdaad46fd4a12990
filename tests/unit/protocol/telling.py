"""How a scenario text shows messages, notes and jobs: one short line each, with names for ids."""

import dataclasses
from collections.abc import Mapping
from operator import attrgetter

_LENGTH_MAX = 48
"""Of one value."""

SHOWN_FIELDS = {
    "Assign": "stage_index reason",
    "Average": "averaging.iteration part",
    "Backward": "microbatch",
    "BackwardGradient": "microbatch",
    "Bans": "version",
    "BeginAggregation": "averaging.iteration num_committed num_deferred",
    "CanTake": "iteration",
    "Candidacy": "term",
    "Canvass": "iteration",
    "CanvassAnswer": "silent",
    "Capacity": "capacity",
    "CapacityAnswer": "refusal",
    "CatchUp": "iteration",
    "ChangeAnswer": "change_id units",
    "ChangeDecision": "change_id units",
    "Claim": "flow_id",
    "Complete": "microbatch",
    "Confirm": "term",
    "Deny": "microbatch reason",
    "Differs": "nodes",
    "Drop": "microbatch",
    "Embed": "microbatch",
    "EmbedBackward": "microbatch",
    "Fetch": "microbatch",
    "FlowAnswer": "request_id flow_id",
    "FlowCost": "data_node cost_s num_unpaired",
    "Folded": "microbatch",
    "Follow": "stage_index",
    "Followed": "committed refusal",
    "Forward": "microbatch",
    "ForwardActivation": "microbatch",
    "Given": "microbatch worker",
    "GradientNorm": "gradient_norm",
    "GradientSquares": "square_sums",
    "Head": "microbatch",
    "Heartbeat": "bans",
    "Holding": "made folding folded",
    "Install": "flow_id path",
    "Join": "role capacity stage_index",
    "LeaderIs": "term leader",
    "Leave": "reason",
    "Mend": "iteration reason",
    "Mended": "microbatch",
    "Offer": "window",
    "Open": "outcome opening.iteration reason",
    "Prepared": "stage_index",
    "ReducePart": "part num_microbatches",
    "ReducedPart": "part",
    "Refuse": "reason again_s",
    "RequestChange": "change_id is_closed units",
    "RequestFlow": "request_id data_node",
    "RequestUnits": "request_id units",
    "Reroute": "microbatch path owing",
    "Revoke": "microbatch attempt",
    "Settled": "num_microbatches",
    "StageActivation": "microbatch leg",
    "StageGradient": "microbatch leg",
    "Suspect": "node_id reason",
    "Taken": "microbatch worker",
    "Unable": "microbatch reason",
    "UnitsAnswer": "request_id units",
    "Vote": "term granted",
    "Withdraw": "request_id",
    "bans.changed": "num_banned",
    "candidate.joined": "peer",
    "candidate.refused": "peer reason",
    "capacity.agreed": "capacity",
    "capacity.refused": "reason",
    "flow.completed": "flow cost_s",
    "iteration.aborted": "iteration reason",
    "iteration.committed": "iteration",
    "step.committed": "iteration",
    "iteration.opened": "iteration num_members",
    "leader.doubted": "peer term",
    "leader.elected": "term num_votes",
    "leader.resigned": "term",
    "leader.standing": "term iteration",
    "leader.stopped": "term",
    "link.broken": "peer",
    "link.restored": "peer",
    "member.aside": "peer pause_s reason",
    "member.differs": "peer stage",
    "member.doubted": "peer suspect",
    "microbatch.deferred": "microbatch reason",
    "node.resumed": "capacity",
    "parameters.loaded": "iteration",
    "parameters.requested": "iteration num_donors",
    "peer.suspected": "peer reason",
    "quorum.lost": "num_gone num_total",
    "run.returned": "iteration source num_repeated reason",
    "stage.assigned": "stage reason",
    "successor.awaited": "stage",
    "state.differs": "stage iteration",
    "state.loaded": "iteration",
    "state.requested": "iteration num_donors",
    "task.given_up": "microbatch peer",
    "task.pooled": "microbatch",
}
"""What a line shows of a message or note beside its name: the fields that the texts speak of."""


def fields_of(kind: str, thing: object) -> str:
    """Return what a line shows of a message, job or note behind its kind, as ` name=value`.

    Raises:
        AssertionError: `SHOWN_FIELDS` names a field that the thing does not have.
    """
    told = []
    for path in SHOWN_FIELDS.get(kind, "").split():
        if isinstance(thing, Mapping):
            value = thing.get(path, "")
        else:
            head = path.partition(".")[0]
            known = [field.name for field in dataclasses.fields(thing)]  # type: ignore[arg-type]
            assert head in known, f"{kind} has no field {head}: correct it in {__name__}"
            value = attrgetter(path)(thing)
        shown = _value(value)
        if shown not in ("", "[]"):
            told.append(f" {path.rpartition('.')[2]}={shown}")
    return "".join(told)


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (tuple, list)):
        return "[" + " ".join(_value(v) for v in value) + "]"
    text = str(value)
    # A long word is an id, for which a name will stand.
    is_short = len(text) <= _LENGTH_MAX or " " not in text
    return text if is_short else f"{text[:_LENGTH_MAX]}..."


def names_in(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the hosts' names for the ids of their nodes."""
    for shown, name in names.items():
        text = text.replace(shown, name)
    return text
