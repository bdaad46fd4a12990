"""One iteration's batch, as the leader counts it: every data node reports its share."""

from decod.ids import AveragingId, NodeId
from decod.protocol.core.digest import add_digests
from decod.protocol.core.messages import BeginAggregation, Report
from decod.protocol.core.view import View


class Batch:
    """The reports of one iteration after another."""

    def __init__(self) -> None:
        self._reports: dict[NodeId, Report] = {}
        self.begun: BeginAggregation | None = None
        """What the batch holds, once all data nodes have reported."""

    def begin(self) -> None:
        """Another iteration is opened, or this one goes on in another view."""
        self._reports.clear()
        self.begun = None

    def report(self, sender: NodeId, message: Report, view: View) -> BeginAggregation | None:
        """Take in the report of a data node. Return what the batch holds if it was the last."""
        assert self.begun is None, "the batch is whole: nothing more enters it"
        self._reports[sender] = message
        if len(self._reports) < len(view.data_nodes):
            return None
        reports = self._reports.values()
        self.begun = BeginAggregation(
            AveragingId(message.iteration, view.version),
            num_committed=sum(r.num_committed for r in reports),
            digest=add_digests(r.digest for r in reports),
            loss_sum=sum(r.loss_sum for r in reports),
            num_tokens=sum(r.num_tokens for r in reports),
            num_deferred=sum(r.num_deferred for r in reports),
            num_reread=sum(r.num_reread for r in reports),
        )
        return self.begun

    def missing(self, view: View) -> str:
        """Return what an iteration without progress waits for, as far as the leader knows."""
        late = [m.label for m in view.data_nodes if m.node_id not in self._reports]
        return f"the batches of {', '.join(late)}" if late else "the votes of all members"
