"""The time of an iteration of a pipeline: `decod leader` and `decod join`.

Microbatches pass through the stages. Then the members of each stage average, and all commit:

    iteration = start + passes + averaging
    passes    = busiest + fill + rest
    averaging = transfer + arithmetic + step + vote

`busiest` is the time of the resource that is busy longest: a node's device with its share of the
microbatches, or the sends of a node. `fill` is the time in which the pipeline fills and drains:
that of one microbatch on its whole way, without its time at the busiest resource. `rest` is what
the records show beyond that, such as the latency of links. `vote` is the rest of averaging:
messages by which the members agree on the step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from decod.insight.iteration_model import Cause, Remedy, change, finer_ratio, mean
from decod.journal.records import RoundRow

_SLOW_RATIO = 1.5
"""A relay that takes so many times as long for a microbatch as the median relay is slow."""
_EVERY = 8
"""Iterations between averages that a change tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTimes:
    """How long a node is busy in an iteration, in seconds."""

    name: str
    stage: int
    steps: float
    """Microbatches that pass its stage there."""
    data_s: float = 0.0
    compute_s: float = 0.0
    """Passes, and other jobs beside them."""
    sending_s: float = 0.0
    """While activations or gradients are on their way from it."""

    @property
    def busy_s(self) -> float:
        return self.data_s + self.compute_s

    @property
    def step_s(self) -> float:
        """Time of its device for one microbatch, without data."""
        return self.compute_s / max(self.steps, 1e-9)

    @property
    def occupied_s(self) -> float:
        """Time of the busier of its device and its uplink."""
        return max(self.busy_s, self.sending_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Mean times of an iteration. See the module for the formula."""

    nodes: tuple[NodeTimes, ...]
    """Those with records."""
    num_peers: int
    """With those without records."""
    samples: float
    start_s: float
    rest_s: float
    """Of the passes. Negative if the pipeline never ran empty."""
    transfer_s: float
    arithmetic_s: float
    """Of the average: encode, add up, decode."""
    step_s: float
    """The optimizer's."""
    vote_s: float = 0.0
    every: int = 1
    """Iterations from one average to the next."""
    compression: str | None = None
    activation_compression: str | None = None

    @property
    def busiest_s(self) -> float:
        return self._busiest.occupied_s

    @property
    def fill_s(self) -> float:
        """Time in which the pipeline fills and drains."""
        way_s = 0.0
        for stage in {node.stage for node in self.nodes}:
            nodes = [node for node in self.nodes if node.stage == stage]
            steps = max(sum(node.steps for node in nodes), 1e-9)
            way_s += sum(node.busy_s + node.sending_s for node in nodes) / steps
        busiest = self._busiest
        return max(0.0, way_s - busiest.occupied_s / max(busiest.steps, 1e-9))

    @property
    def latency_s(self) -> float:
        """Time of the passes in which the busiest resource is not busy."""
        return max(0.0, self.fill_s + self.rest_s)

    @property
    def averaging_s(self) -> float:
        return self.transfer_s + self.arithmetic_s + self.step_s + self.vote_s

    @property
    def round_s(self) -> float:
        return self.start_s + self.busiest_s + self.latency_s + self.averaging_s

    @property
    def _busiest(self) -> NodeTimes:
        return max(self.nodes, key=lambda node: node.occupied_s)

    @property
    def bound(self) -> Cause:
        """What the busiest resource does."""
        node = self._busiest
        if node.sending_s >= node.busy_s:
            return Cause.LINKS
        return Cause.DATA if node.data_s > node.compute_s else Cause.COMPUTE

    # --- one peer -----------------------------------------------------------------------------

    @property
    def slow_peer(self) -> str:
        """The busiest relay, if it takes much longer for a microbatch than the others do."""
        node = self._busiest
        others = self._other_relays(node)
        if self.bound is not Cause.COMPUTE or not node.stage or not others:
            return ""
        usual_s = median(each.step_s for each in others)
        return node.name if node.step_s >= _SLOW_RATIO * usual_s else ""

    def _other_relays(self, node: NodeTimes) -> list[NodeTimes]:
        """Return the other relays with work. Stages differ by one block at most."""
        return [each for each in self.nodes if each.stage and each is not node and each.steps]

    def _without_slowness(self) -> "PipelineModel":
        """Return the model if the slow relay were as fast as the median of the others."""
        slow = self.slow_peer
        node = next(each for each in self.nodes if each.name == slow)
        usual_s = median(each.step_s for each in self._other_relays(node))
        return self._with_node(replace(node, compute_s=node.steps * usual_s))

    def _with_node(self, node: NodeTimes) -> "PipelineModel":
        return self._with_nodes(
            tuple(node if each.name == node.name else each for each in self.nodes)
        )

    def _with_nodes(self, nodes: tuple[NodeTimes, ...]) -> "PipelineModel":
        # That the busiest resource hides some of the pipeline's filling says nothing of another.
        return replace(self, nodes=nodes, rest_s=max(0.0, self.rest_s))

    # --- causes and changes -------------------------------------------------------------------

    def causes(self) -> dict[Cause, float]:
        found = dict.fromkeys(Cause, 0.0)
        busiest_s = self.busiest_s
        if self.slow_peer:
            excess_s = busiest_s - self._without_slowness().busiest_s
            found[Cause.PEER], busiest_s = excess_s, busiest_s - excess_s
        if self.bound is Cause.DATA:
            data_s = busiest_s - self.with_fast_data().busiest_s
            found[Cause.DATA], busiest_s = data_s, busiest_s - data_s
        elif self.bound is Cause.LINKS:
            device_s = max(node.busy_s for node in self.nodes)
            found[Cause.LINKS], busiest_s = busiest_s - device_s, device_s
        found[Cause.COMPUTE] = busiest_s
        found[Cause.LATENCY] = self.latency_s
        found[Cause.AVERAGING] = self.averaging_s
        found[Cause.MATCHMAKING] = self.start_s
        return found

    def changes(self) -> list[Remedy]:
        found = [
            change(
                self,
                self.with_fast_data(),
                Cause.DATA,
                "put the prepared data on a faster disk, or add a data node (batch.num_data_nodes)",
                "assumes that reading takes no time any more",
            ),
            self._more_relays(),
            *self._changes_of_links(),
            *self._changes_of_averages(),
            change(
                self,
                self.with_batch(2),
                Cause.LATENCY,
                "double batch.num_microbatches",
                "the batch is twice as large; relays need capacity for the microbatches",
            ),
        ]
        if slow := self.slow_peer:
            found.append(
                change(
                    self,
                    self._without_slowness(),
                    Cause.PEER,
                    f"replace {slow}, or find out what slows it down",
                    "it then takes as long for a microbatch as the median of the other relays",
                )
            )
        return found

    def _more_relays(self) -> Remedy:
        stage = max(self.nodes, key=lambda node: node.busy_s).stage
        num = sum(node.stage == stage for node in self.nodes)
        what = f"add a relay to stage {stage}" if stage else "add a data node"
        caution = f"it is as fast as the {'other there' if num == 1 else 'others there'}"
        return change(self, self.with_relay(stage), Cause.COMPUTE, what, caution)

    def _changes_of_links(self) -> list[Remedy]:
        found = []
        for method in ("bf16", "int8", "int4"):
            ratio = finer_ratio(self.activation_compression, method)
            if ratio is not None and ratio < 1:
                after, caution = self.with_sending(ratio), "activations are rounded"
                what = f'set activations.compression = "{method}"'
                found.append(change(self, after, Cause.LINKS, what, caution))
        if self.bound is Cause.LINKS:
            name = self._busiest.name
            nodes = tuple(replace(n, sending_s=0.0) if n.name == name else n for n in self.nodes)
            what = f"give {name} a faster uplink, or lift its --upload-max"
            caution = "assumes that its sends take no time any more"
            found.append(change(self, self._with_nodes(nodes), Cause.LINKS, what, caution))
        return found

    def _changes_of_averages(self) -> list[Remedy]:
        every = self.every * _EVERY
        found = [
            change(
                self,
                self.with_seldom_averages(_EVERY),
                Cause.AVERAGING,
                f'set sync.method = "diloco" and sync.every = {every}',
                "members step by themselves between averages: watch the loss",
            )
        ]
        ratio = finer_ratio(self.compression, "bf16")
        if ratio is not None and ratio < 1:
            after = replace(self, transfer_s=self.transfer_s * ratio)
            what = 'send averages as bf16: reduction.wire_dtype = "bfloat16", or sync.compression'
            caution = "averages are rounded"
            found.append(change(self, after, Cause.AVERAGING, what, caution))
        return found

    # --- the model with a change --------------------------------------------------------------

    def with_fast_data(self) -> "PipelineModel":
        """Return the model if reading data took no time."""
        return self._with_nodes(tuple(replace(node, data_s=0.0) for node in self.nodes))

    def with_relay(self, stage: int) -> "PipelineModel":
        """Return the model with one more node in a stage, among which the work is dealt out."""
        num = sum(node.stage == stage for node in self.nodes)
        return self._with_less(stage, num / (num + 1))

    def _with_less(self, stage: int, share: float) -> "PipelineModel":
        nodes = tuple(
            replace(
                node,
                steps=node.steps * share,
                data_s=node.data_s * share,
                compute_s=node.compute_s * share,
                sending_s=node.sending_s * share,
            )
            if node.stage == stage
            else node
            for node in self.nodes
        )
        return self._with_nodes(nodes)

    def with_sending(self, ratio: float) -> "PipelineModel":
        """Return the model if so many times as many bytes of activations travelled."""
        nodes = tuple(replace(node, sending_s=node.sending_s * ratio) for node in self.nodes)
        return self._with_nodes(nodes)

    def with_seldom_averages(self, factor: int) -> "PipelineModel":
        """Return the model if averages came so many times as seldom. All still step and vote."""
        return replace(
            self,
            transfer_s=self.transfer_s / factor,
            arithmetic_s=self.arithmetic_s / factor,
            every=self.every * factor,
        )

    def with_batch(self, factor: float) -> "PipelineModel":
        """Return the model with a larger batch. The pipeline fills and drains as often."""
        larger = self
        for stage in {node.stage for node in self.nodes}:
            larger = larger._with_less(stage, factor)
        return replace(larger, samples=self.samples * factor)

    def unknown(self) -> list[str]:
        found = []
        if missing := self.num_peers - len(self.nodes):
            found.append(
                f"records of {missing} of {self.num_peers} nodes are missing: time in which these"
                " nodes or their links are busy is counted as latency here"
            )
        return found


def pipeline_model(rows: Sequence[Sequence[RoundRow]]) -> PipelineModel:
    """Return the model of some iterations.

    Args:
        rows: By iteration, a row of each node with records. At least one.
    """
    every = [row for each in rows for row in each]
    peers = dict.fromkeys(row.peer for row in every)
    nodes = tuple(_node([row for row in every if row.peer == peer], len(rows)) for peer in peers)
    last = every[-1]
    # Relays begin when the first activation reaches them, so the first node's start counts.
    start_s = mean([min(row.matchmaking_s or 0.0 for row in each) for each in rows])
    averaging_s = mean([max(row.averaging_s or 0.0 for row in each) for each in rows])
    arithmetic_s = mean([max(row.averaging_compute_s or 0.0 for row in each) for each in rows])
    step_s = mean([max(row.optimizer_s or 0.0 for row in each) for each in rows])
    # The slowest arithmetic and the slowest step need not be one node's.
    arithmetic_s = min(arithmetic_s, averaging_s)
    step_s = min(step_s, averaging_s - arithmetic_s)
    rest_s = averaging_s - arithmetic_s - step_s
    sending_s = mean([max(row.average_sending_s or 0.0 for row in each) for each in rows])
    model = PipelineModel(
        nodes=nodes,
        num_peers=max(len(nodes), round(mean([row.peers or 1 for row in every]))),
        samples=mean([max(row.round_samples or row.samples for row in each) for each in rows]),
        start_s=start_s,
        rest_s=0.0,
        transfer_s=min(sending_s, rest_s),
        arithmetic_s=arithmetic_s,
        step_s=step_s,
        vote_s=max(0.0, rest_s - sending_s),
        every=last.averages_every or 1,
        compression=last.compression,
        activation_compression=last.activation_compression,
    )
    measured_s = mean([row.round_s for row in every])
    passes_s = measured_s - model.start_s - model.averaging_s
    # What the nodes say of their work is never less than what they did.
    latency_s = max(0.0, passes_s - model.busiest_s)
    return replace(model, rest_s=latency_s - model.fill_s)


def _node(rows: Sequence[RoundRow], num_rounds: int) -> NodeTimes:
    stage = Counter(row.stage or 0 for row in rows).most_common(1)[0][0]
    compute = [sum((r.forward_s or 0.0, r.backward_s or 0.0, r.other_s or 0.0)) for r in rows]
    return NodeTimes(
        name=rows[-1].name,
        stage=stage,
        # A node that was there for some of the iterations only is idle in the others.
        steps=sum(row.steps or 0 for row in rows) / num_rounds,
        data_s=sum(row.data_s or 0.0 for row in rows) / num_rounds,
        compute_s=sum(compute) / num_rounds,
        sending_s=sum(row.sending_s or 0.0 for row in rows) / num_rounds,
    )
