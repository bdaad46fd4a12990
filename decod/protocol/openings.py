"""What an opening changes for a node that takes it in."""

from decod.protocol.core import messages
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Note, Stop, StopReason
from decod.protocol.core.era import Source
from decod.protocol.core.view import Opening, Role, View
from decod.protocol.strategy.strategy import Strategy


def changes_view(opening: Opening, context: Context) -> bool:
    """Return whether an opening's view is another than the context's."""
    old, new = context.view, opening.view
    return (old.term, old.version) != (new.term, new.version)


def begins_era(opening: Opening, context: Context) -> bool:
    """Return whether the run goes back to an earlier state."""
    return opening.iteration.era > context.iteration.era


def in_step(context: Context, strategy: Strategy, decision: messages.Open) -> bool:
    """Return whether a member can follow: it holds what was committed, has voted for it, or goes
    back.

    A leader that was elected without the votes of most of a stage may commit what the others hold.
    """
    committed, view, origin = decision.opening.committed, context.view, decision.opening.origin
    if context.member.role is Role.CLIENT:
        return True  # It fetches what it lacks.
    anchor = decision.opening.anchor.number
    if begins_era(decision.opening, context):
        back = origin is not None and origin.source is not Source.NEIGHBOURS
        return back or (origin is not None and anchor == strategy.copy.stage.iteration)
    voted = strategy.voted_for(committed)
    if decision.committed and decision.view_term:
        told = (decision.view_term, decision.view_version)
        own = strategy.proposal
        level = dict(decision.hashes).get(context.member.stage_index, own) == own
        voted = voted and told == (view.term, view.version) and level
    return anchor == strategy.copy.stage.iteration or voted


def superseded(view: View) -> Stop:
    """Return the end of a leader whom another has followed."""
    leader = view.by_id[view.leader].label
    return Stop(StopReason.SUPERSEDED, f"{leader} leads the run in term {view.term}")


def note_opening(context: Context) -> Note:
    """Return the note that an iteration has begun."""
    fields = (
        ("iteration", str(context.iteration)),
        ("view_version", context.view.version),
        ("num_members", len(context.view.members)),
        ("term", context.view.term),
        ("leader", context.view.leader),
    )
    return Note("iteration.opened", fields)
