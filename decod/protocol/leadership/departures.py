"""Members that want to leave: who may go with the next commit, and who is needed until later."""

from collections.abc import Container, Mapping

from decod.ids import NodeId
from decod.protocol.core.effects import Effect, noted
from decod.protocol.core.view import View


def leaving_notes(view: View, node: NodeId, leaving: Mapping[NodeId, str]) -> list[Effect]:
    """Return the notes that a member wants to leave, and that its whole stage does."""
    effects: list[Effect] = [noted("member.leaving", peer=node, reason=leaving[node])]
    stage = view.by_id[node].stage_index
    if all(m.node_id in leaving for m in view.roster(stage)):
        effects.append(noted("stage.ending", stage=stage, peer=node))
    return effects


def still_needed(view: View, leaving: Container[NodeId]) -> set[NodeId]:
    """Return leaving nodes that are needed until somebody else serves their stage."""
    # Where all are paused, one keeps the weights.
    serving = [w or r for r, w in zip(view.rosters, view.workers, strict=True) if r]
    return {nodes[0].node_id for nodes in serving if all(m.node_id in leaving for m in nodes)}
