"""A data node judges between the only two members of a stage, if one says that the other lies.

It is of another stage. So it fetches the parameters that both have computed with, has its device
build the stage beside its own, and repeats the relay's passes there (`decod.protocol.strategy.
auditor`). The parameters are those that all members have voted on, so neither of the two can give
false ones. One pass that is proven wrong is enough.

It has no part in the stage's average. Of what the relay has contributed it only knows what the
other says.
"""

from typing_extensions import override

from decod.protocol.core.digest import add_digests, digest_of
from decod.protocol.core.effects import Effect, FetchState
from decod.protocol.core.events import JobFinished, StateFetched, StateFetchFailed
from decod.protocol.core.jobs import Built, Job, StandIn
from decod.protocol.strategy.auditor import Auditor


class StageJudge(Auditor):
    """A data node's part in the audit of a relay's work of one iteration."""

    beside = True
    _asked = _stands = False
    """Whether the parameters are on their way; whether the stage is built."""

    def fetch(self, num_microbatches: int, parameter_hash: str) -> list[Effect]:
        """Get the stage's parameters.

        Args:
            num_microbatches: In the iteration.
            parameter_hash: Of the parameters. Empty: it is not known.
        """
        context, relay = self._context, self.case.relay
        self._num_averaged, self._asked = num_microbatches, True
        donors = (*(node for node in self._roster if node != relay), relay)
        stage, iteration = context.view.by_id[relay].stage_index, context.anchor.number
        # Rounded parameters have no hash that was voted on.
        whole = context.run.rounded
        return [FetchState(donors, stage, iteration, parameter_hash, with_optimizer=whole)]

    def takes(self, event: StateFetched | StateFetchFailed) -> bool:
        """Whether an event is about what this judge has asked for."""
        stage = self._context.view.by_id[self.case.relay].stage_index
        mine = (event.stage_index, event.iteration) == (stage, self._context.anchor.number)
        return mine and self._asked and not self._over

    def fetched(self, event: StateFetched) -> list[Effect]:
        """The parameters are here."""
        context, self._asked = self._context, False
        tensor = context.tensors.add(event.tensor)
        of = (event.stage_index, event.iteration, event.manifest, context.run.rounded)
        return context.compute.submit(StandIn(*of), self, [tensor])

    def fetch_failed(self, event: StateFetchFailed) -> list[Effect]:
        """Nobody gives them."""
        return self.give_up(event.reason)

    def give_up(self, reason: str) -> list[Effect]:
        """Tell the leader that this node can't judge."""
        self._asked = False
        return self._end(failure=reason)

    @override
    def job_done(self, now_s: float, job: Job, event: JobFinished) -> list[Effect]:
        if not isinstance(job, StandIn):
            return super().job_done(now_s, job, event)
        assert isinstance(event.result, Built), event
        self._stands = True
        return [effect for each in sorted(self._told) for effect in self._replay(each)]

    @override
    def job_failed(self, now_s: float, job: Job, reason: str) -> list[Effect]:
        if isinstance(job, StandIn):
            return self._end(failure=reason)
        return super().job_failed(now_s, job, reason)

    @property
    @override
    def _may_replay(self) -> bool:
        return self._stands

    @property
    def _complete(self) -> bool:
        """Whether all passes of the relay were repeated."""
        digest = add_digests(digest_of([microbatch]) for microbatch in self._passes)
        return self._all_parts and self._claim == (len(self._passes), digest)

    @property
    @override
    def _all_sketched(self) -> bool:
        return self._complete and super()._all_sketched

    @override
    def _compare(self) -> list[Effect]:
        wrong = any(message.findings for message in self._passes.values())
        return self._end() if not self._over and (wrong or self._complete) else []
