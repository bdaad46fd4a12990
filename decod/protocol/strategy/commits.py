"""What a member tells of the end of iterations, whatever its strategy."""

from decod.protocol.averaging.averager import Weight
from decod.protocol.core.context import Context
from decod.protocol.core.effects import Effect, Note
from decod.protocol.core.era import Origin
from decod.protocol.core.messages import BeginAggregation, Open

Account = tuple[tuple[str, object], ...]
"""What a vote rests on, as fields of a note."""


def account_of(
    context: Context, begun: BeginAggregation, folded: Weight, *, num_members: int
) -> Account:
    """Return what a node has put into an average.

    Args:
        context: The node's.
        begun: What the batch holds.
        folded: What the node's sum holds.
        num_members: All who contribute to the average.
    """
    return (
        ("term", context.view.term),
        ("view_version", begun.averaging.view_version),
        ("stage", context.member.stage_index),
        ("num_members", num_members),
        ("num_folded", folded.num),
        ("digest_folded", folded.digest),
        ("num_batch", begun.num_committed),
        ("digest_batch", begun.digest),
    )


def commit_notes(
    decision: Open,
    begun: BeginAggregation | None,
    account: Account,
    context: Context,
    *,
    voted: bool,
) -> list[Effect]:
    """Return the note that an iteration is committed.

    Args:
        decision: That opens the next.
        begun: What the batch held, if this node knows.
        account: What this node's vote rests on.
        context: The node's.
        voted: Whether it has voted for the iteration that is committed.
    """
    committed = decision.opening.committed
    if decision.committed:
        loss, num_tokens = decision.loss, decision.num_tokens
    elif begun is not None and voted:
        loss, num_tokens = begun.loss_sum / begun.num_committed, begun.num_tokens
    else:
        return []
    fields = (
        ("iteration", str(committed)),
        ("loss", loss),
        ("num_tokens", num_tokens),
        *account,
        ("num_passes", context.compute.num_passes),
    )
    return [Note("step.committed", fields)]


def note_return(decision: Open, context: Context, stage_before: int | None) -> list[Effect]:
    """Return the notes that the run goes back, and that this node serves another stage.

    Args:
        decision: Begins the era.
        context: Has its view.
        stage_before: Of which the node was a member. None: of none.
    """
    origin, index = decision.opening.origin, context.member.stage_index
    assert origin is not None
    fields = (
        ("iteration", decision.opening.committed.number),
        ("source", origin.source.value),
        ("num_repeated", origin.num_repeated),
        ("reason", _why_back(decision, origin)),
    )
    effects: list[Effect] = [Note("run.returned", fields)]
    if stage_before not in (None, index):
        context.why = "all nodes of it were lost"
        effects.append(Note("stage.assigned", (("stage", index), ("reason", context.why))))
    return effects


def _why_back(decision: Open, origin: Origin) -> str:
    """Return why there is another era; who hears of it later is told why the iteration was
    repeated.
    """
    told = decision.reason
    return told if told.startswith(origin.reason) else origin.reason
