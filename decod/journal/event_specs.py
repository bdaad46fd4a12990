"""The register of events: their names, their level, and the text that a person reads.

Names are lower-case `noun.participle`. The core uses these names in its `Note` effects. It does not
import this module, so a tidy test compares the two. An event that is not registered is still shown,
with all its fields: losing a line would be worse.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from decod.texts import clean_text

EVENT_NAME = re.compile(r"[a-z]+(_[a-z]+)*\.[a-z]+(_[a-z]+)*\Z")
NUM_FIELDS_MAX = 16
"""Most fields that are shown of one event."""


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One kind of event."""

    name: str
    text: str
    """One line with `{field}` for values. The fields named in it are the declared fields."""
    level: int = logging.INFO
    """ERROR: a human must act. WARNING: degraded and handled. INFO: at most a few lines per
    iteration. DEBUG: per message."""

    @property
    def fields(self) -> tuple[str, ...]:
        return tuple(re.findall(r"\{([a-z_]+)\}", self.text))


_D, _I, _W, _E = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

_SPECS = (
    # Life of a node; noted by the daemon.
    EventSpec("node.started", "{node_id} listens on {address}"),
    EventSpec("address.doubtful", "{reason}", _W),
    EventSpec("node.stopped", "node stopped: {reason}"),
    EventSpec("port.mapped", "the router passes port {port} on to this host"),
    EventSpec("port.unmapped", "no router passes port {port} on to this host: {reason}", _D),
    EventSpec(
        "node.outbound",
        "nobody can dial this node at {address} ({reason}): it keeps its connections open itself",
        _W,
    ),
    EventSpec("node.introduced", "the leader at {address} knows that this node gets ready", _D),
    EventSpec(
        "clock.differs",
        "this host's clock is {seconds} s {way} the leader's: set it, for example by NTP",
        _W,
    ),
    EventSpec("wait.lasting", "waiting for {what}, for {seconds} s so far"),
    EventSpec("node.draining", "leaving within {timeout_s} s: work in hand is being finished"),
    EventSpec(
        "node.reconnecting", "out of the run ({reason}): looking for it again in {pause_s} s", _D
    ),
    EventSpec("node.paused", "paused: takes no microbatches, keeps its stage's state in step"),
    EventSpec("node.resumed", "takes microbatches again, {capacity} at a time"),
    EventSpec(
        "capacity.lowered",
        "the device ran out of memory again: takes {capacity} microbatches at a time from now on",
        _W,
    ),
    EventSpec("capacity.agreed", "the leader agrees to a capacity of {capacity}", _D),
    EventSpec("capacity.refused", "this node stays as it is: {reason}", _W),
    EventSpec("pause.wanted", "to be paused ({cause}): {reason}"),
    EventSpec("pause.unneeded", "no longer a cause for a pause: {cause}"),
    EventSpec("pause.refused", "still not as wanted: {reason}", _W),
    EventSpec("probe.failed", "whether this host is {rule} can't be known: {reason}", _W),
    EventSpec("settings.changed", "changed by the operator: {names}"),
    EventSpec(
        "successor.awaited", "nobody else serves stage {stage}: staying a while for a successor", _W
    ),
    EventSpec(
        "contribution.awaited",
        "staying until the others have what this node has learnt: they average for that",
    ),
    EventSpec("run.started", "run {run} begins, with id {run_id}", _D),
    EventSpec("run.resumed", "run {run} goes on after iteration {iteration}, with id {run_id}", _D),
    EventSpec("run.entered", "this node takes part in run {run}, with id {run_id}", _D),
    EventSpec("run.finished", "run {run} is over after iteration {iteration}", _D),
    EventSpec(
        "memory.recomputed",
        "backward passes compute their forward passes again: less memory, a third more work",
    ),
    EventSpec(
        "memory.spread",
        "the stage is spread over {num_devices} devices, with its optimizer in the host's memory",
    ),
    EventSpec("worker.started", "compute process runs on {device}", _D),
    EventSpec(
        "worker.hung",
        "compute process has not answered for {waited_s} s (job: {job}): it is ended",
        _E,
    ),
    EventSpec("worker.died", "compute process ended: {reason}", _E),
    EventSpec(
        "files.few",
        "this process may open {limit} files: {reason}; to do: {fix}",
        _W,
    ),
    EventSpec(
        "files.exhausted",
        "all {limit} files that this process may open are open ({reason}); to do: {fix}",
        _E,
    ),
    EventSpec("task.failed", "a bug in decod, see the log file: {reason}", _E),
    EventSpec("model.exported", "model of iteration {iteration} written to {path}"),
    EventSpec("model.incomplete", "the model in {path} has {reason}", _W),
    EventSpec(
        "checkpoint.written",
        "checkpoint of iteration {iteration} written to {path} in {duration_s} s, {gathered_s} s of"
        " them to gather it",
    ),
    EventSpec(
        "checkpoint.damaged", "checkpoint of iteration {iteration} is not used: {reason}", _W
    ),
    EventSpec(
        "evaluation.done",
        "held-out text after iteration {iteration}: loss {loss}, perplexity {perplexity}, over"
        " {num_tokens} tokens in {duration_s} s",
    ),
    EventSpec("text.written", "after iteration {iteration} the model writes: {prompt}{text}"),
    EventSpec("text.failed", "nothing written by the model now: {reason}", _W),
    EventSpec("evaluation.failed", "no evaluation after iteration {iteration}: {reason}", _W),
    EventSpec(
        "part.written",
        "wrote stage {stage} after iteration {iteration} into the checkpoint store, {num_bytes}"
        " bytes",
    ),
    EventSpec(
        "store.failed",
        "the checkpoint store can't be used after iteration {iteration}, so the leader's disk takes"
        " the checkpoint: {reason}",
        _W,
    ),
    EventSpec(
        "store.unused",
        "{peer} has not written stage {stage} into the checkpoint store, so the leader fetches it:"
        " {reason}",
        _W,
    ),
    EventSpec(
        "store.unread",
        "the checkpoint store can't be read here, so the state comes from the leader: {reason}",
        _W,
    ),
    EventSpec("checkpoint.failed", "CHECKPOINT FAILED at iteration {iteration}: {reason}", _E),
    EventSpec(
        "data.damaged",
        "DATA DAMAGED: {path}: {reason} ({num_blocks} bad blocks so far)",
        _W,
    ),
    EventSpec("metrics.unkept", "this node's metrics are not on disk: {reason}", _W),
    EventSpec(
        "iterations.unkept",
        "loss and rates of iterations are not on disk, and are tried again: {reason}",
        _W,
    ),
    EventSpec("tracking.failed", "{tracker} failed, training goes on: {reason}", _W),
    EventSpec("page.served", "the run's page is at {url}"),
    EventSpec("page.published", "everybody can look at the run at port {port} of this host"),
    EventSpec("page.failed", "a bug in decod's web page, training goes on: {reason}", _W),
    EventSpec("receipts.unkept", "this node's receipts are not on disk: {reason}", _W),
    EventSpec(
        "credit.unkept", "what this host has done is not on disk, and is tried again: {reason}", _W
    ),
    EventSpec(
        "credit.damaged",
        "the ledger of what this host has done is damaged ({reason}): it is kept as {file}, and "
        "a new one begins",
        _W,
    ),
    EventSpec("data.restored", "bytes {first} to {last} of {path} are taken from {source}"),
    EventSpec(
        "data.unreachable",
        "DATA OUT OF REACH: {path}: {reason}; this node tries again, and asks other data nodes",
        _W,
    ),
    EventSpec("data.reachable", "{path} answers again"),
    EventSpec(
        "data.cache_small",
        "THE CACHE OF THE DATA IS SMALL: {path} may hold {limit}, and training reads from {needed}"
        " at a time, so blocks are fetched again and again; give it more (data.cache_max_gib)",
        _W,
    ),
    EventSpec("data.uncached", "blocks of the data can't be kept in {path}: {reason}", _W),
    EventSpec("data.lost", "this node leaves, since its data are bad: {reason}", _E),
    EventSpec(
        "base.fetching",
        "{num_parts} parts of the weights that the run adapts are fetched for stage {stage}",
    ),
    EventSpec("base.fetched", "{num_parts} parts of these weights are here, in {duration_s} s"),
    EventSpec("base.failed", "part {part} of these weights did not come: {reason}", _W),
    EventSpec("message.refused", "message from {peer} refused: {reason}", _W),
    # A node's place in the run.
    EventSpec("stage.assigned", "this node runs stage {stage}: {reason}"),
    EventSpec(
        "state.requested", "members asked for the state of iteration {iteration}: {num_donors}"
    ),
    EventSpec(
        "state.progress",
        "stage {stage}: {percent} % of its state are here, {bytes_per_s} bytes/s, {left_s} s left",
    ),
    EventSpec(
        "state.fetched",
        "state of stage {stage} after iteration {iteration}: {num_bytes} bytes, {num_local} of "
        "them from this host, in {duration_s} s",
    ),
    EventSpec("state.loaded", "state of iteration {iteration} loaded"),
    # What a client does in each iteration.
    EventSpec(
        "parameters.requested",
        "servers asked for the parameters of iteration {iteration}: {num_donors}",
        _D,
    ),
    EventSpec(
        "parameters.fetched",
        "parameters of stage {stage} after iteration {iteration}: {num_bytes} bytes, {num_local} of"
        " them from this host, in {duration_s} s",
        _D,
    ),
    EventSpec("parameters.loaded", "parameters of iteration {iteration} loaded", _D),
    EventSpec(
        "replay.failed",
        "this node is not level with stage {stage}: {reason}; it tries again in {pause_s} s",
        _W,
    ),
    EventSpec("follower.left", "{peer} follows stage {stage} no more: {reason}"),
    EventSpec(
        "run.returned",
        "back to iteration {iteration} ({source}), {num_repeated} iterations are repeated:"
        " {reason}",
        _W,
    ),
    EventSpec("stage.recut", "stage {stage} has blocks {blocks} after iteration {iteration}"),
    EventSpec("return.failed", "{peer} can't go back, and all are asked again: {reason}", _W),
    EventSpec(
        "state.differs",
        "this node's state of stage {stage} after iteration {iteration} is not that of most: "
        "what differs is fetched",
        _W,
    ),
    EventSpec("state.failed", "state from {peer} not loaded: {reason}", _W),
    EventSpec("state.kept", "state of stage {stage} after iteration {iteration} is on disk", _D),
    EventSpec(
        "state.unkept", "state of stage {stage} after iteration {iteration} not kept: {reason}", _W
    ),
    EventSpec(
        "state.damaged",
        "state of stage {stage} after iteration {iteration} on this host's disk is not used:"
        " {reason}",
        _W,
    ),
    EventSpec(
        "start.failed",
        "the state that the run starts from can't be given to stage {stage}: {reason}",
        _W,
    ),
    EventSpec("job.failed", "job {job} failed: {reason}", _W),
    EventSpec("memory.exhausted", "the device has no memory for job {job}: {reason}", _W),
    EventSpec("member.aside", "{peer} is set aside for {pause_s} s: {reason}", _W),
    EventSpec(
        "member.doubted",
        "{peer} says that it can't reach {suspect}, which answers this node, and nobody else says"
        " so: look at {peer}",
        _W,
    ),
    EventSpec("view.missed", "this node lacks a view: it asks {peer} for the whole one", _D),
    EventSpec(
        "member.admitted", "{peer} at {address} became a member, as {role}, with token {token}"
    ),
    EventSpec(
        "member.refused", "{peer} at {address} did not become a member, as {role}: {reason}", _W
    ),
    EventSpec(
        "member.extended",
        "{peer} at {address} stays a member, as {role}: its papers are renewed",
        _D,
    ),
    EventSpec("certificate.issued", "{peer} has papers as {role} until {until_s}", _D),
    EventSpec("member.renewed", "this node's papers are renewed until {until_s}", _D),
    EventSpec(
        "member.unrenewed",
        "this node's papers can't be renewed, and hold for {left_s} s more: {reason}",
        _W,
    ),
    EventSpec("member.banned", "{peer} is banned: {reason}", _W),
    EventSpec("member.unbanned", "{peer} is banned no more"),
    EventSpec("bans.changed", "{num_banned} nodes are banned from the run", _D),
    EventSpec("bans.unproven", "a list of bans from {peer} is not believed: {reason}", _W),
    EventSpec(
        "addresses.unkept",
        "the addresses of the run's members are not on disk, so this node finds the run less easily"
        " after a restart: {reason}",
        _W,
    ),
    EventSpec("bans.unkept", "the list of bans is not on disk: {reason}", _E),
    EventSpec(
        "tokens.unshared", "the data node at {address} does not know all join tokens: {reason}", _W
    ),
    EventSpec("token.created", "token {token} lets {uses} nodes in, as {role}", _D),
    EventSpec("token.used", "token {token} lets {peer} in", _D),
    EventSpec("token.refused", "token {token} does not let {peer} at {address} in: {reason}", _W),
    EventSpec("token.revoked", "token {token} lets nobody in any more"),
    EventSpec(
        "audit_log.failed",
        "THE AUDIT LOG CAN'T BE WRITTEN ({reason}): training goes on, {num_waiting} events wait "
        "and {num_lost} are lost",
        _E,
    ),
    EventSpec(
        "audit_log.restored", "the audit log is written again; {num_lost} events are lost", _W
    ),
    EventSpec("audit_log.altered", "SOMEBODY HAS ALTERED THE AUDIT LOG: {reason}", _E),
    EventSpec("decision.unproven", "{what} from {peer} is not believed: {reason}", _W),
    EventSpec("tensor.unproven", "{peer} has not signed what it sent of {microbatch}", _W),
    EventSpec(
        "complaint.unfounded",
        "{peer} says that what {of} has sent is not finite, but what it shows is",
        _W,
    ),
    EventSpec("relay.lied", "{peer} LIES: {reason}", _E),
    EventSpec(
        "relay.stands_out",
        "{num_members} members say that what {peer} contributes stands out: it is audited",
        _W,
    ),
    EventSpec("audit.disputed", "{peer} or another member lies: {reason}", _W),
    EventSpec(
        "audit.unsettled",
        "somebody says that {peer} lies, and the others of its stage can't settle it: {reason}",
        _W,
    ),
    EventSpec("audit.unfinished", "{peer} could not be audited by {auditor}: {reason}", _W),
    EventSpec("peer.suspected", "{peer} is suspected: {reason}", _W),
    EventSpec("peer.faulty", "{peer} at {address}: {reason} ({fault})", _W),
    EventSpec("link.broken", "no way to {peer}: what is for it goes by way of other members", _W),
    EventSpec("link.restored", "the link to {peer} works again"),
    # Elections.
    EventSpec("leader.doubted", "nothing heard from {peer}, leader of term {term}", _W),
    EventSpec("leader.standing", "standing for leader of term {term} in iteration {iteration}", _W),
    EventSpec("leader.elected", "this node leads term {term}, by {num_votes} votes", _W),
    EventSpec("leader.stopped", "this node's term {term} is over: another was voted for", _W),
    EventSpec("leader.resigned", "this node gives up term {term}, for another to lead"),
    EventSpec("handover.failed", "this node goes on leading: {reason}", _W),
    EventSpec(
        "vote.failed", "the vote in term {term} can't be written ({reason}): this node abstains", _E
    ),
    # Flows and microbatches.
    EventSpec("flow.completed", "flow {flow} starts at {first} and costs {cost_s} s", _D),
    EventSpec(
        "candidate.refused",
        "the run does not take this node yet: {reason}; it asks again from time to time",
        _W,
    ),
    EventSpec("flow.exchanged", "a flow of {data_node} goes on where one of {other}'s did", _D),
    EventSpec("flow.redirected", "a flow of {data_node} comes here instead of to {other}", _D),
    EventSpec("flows.settled", "settlement {epoch} is used: {num_flows} flows", _D),
    EventSpec("microbatch.refused", "microbatch {microbatch} from {peer} is refused: {reason}", _W),
    EventSpec("microbatch.deferred", "microbatch {microbatch} waits: {reason}", _W),
    EventSpec("microbatch.lost", "microbatch {microbatch} is given up", _W),
    EventSpec(
        "task.pooled", "microbatch {microbatch} waits for another worker: its own is slow", _D
    ),
    EventSpec("task.given_up", "worker {peer} gives the backward pass of {microbatch} back", _D),
    # Iterations, as a member sees them.
    EventSpec(
        "iteration.opened",
        "iteration {iteration} with {num_members} members, view {view_version}",
        _D,
    ),
    EventSpec(
        "step.committed", "step of iteration {iteration}: loss {loss} over {num_tokens} tokens", _D
    ),
    EventSpec(
        "learning.lost",
        "what stage {stage} learnt from {num_microbatches} microbatches is lost with its members",
        _W,
    ),
    EventSpec(
        "learning.repeated",
        "{num_microbatches} microbatches are read again, since relays that had learnt from them "
        "are gone; {num_waiting} wait for that",
        _W,
    ),
    EventSpec("learning.shared", "an average holds what the members have learnt: the run may end"),
    EventSpec(
        "average.hastened",
        "iteration {iteration} ends with an average, because somebody wants to leave",
    ),
    EventSpec(
        "result.refused",
        "what {peer} computed of microbatch {microbatch} is refused: {reason}",
        _W,
    ),
    EventSpec(
        "contribution.refused",
        "what {peer} contributed to an average is refused, and left out: {reason}",
        _W,
    ),
    EventSpec(
        "contribution.averaged",
        "part {part} of the average of {iteration} holds {num_folded} microbatches of {peer}, "
        "digest {digest_folded}",
        _D,
    ),
    EventSpec(
        "average.dropped",
        "what stage {stage} learnt in one outer step is lost: {reason}",
        _W,
    ),
    EventSpec(
        "member.differs", "{peer} differs from the rest of stage {stage}: it fetches its state", _W
    ),
    # Decisions of the leader.
    EventSpec("candidate.joined", "{peer} wants to join with capacity {capacity}"),
    EventSpec(
        "candidate.unreachable",
        "{peer} can't be reached at {address}, and is not let in: {reason}",
        _W,
    ),
    EventSpec(
        "identity.shared",
        "TWO HOSTS HAVE ONE IDENTITY, {peer}: the one at {known_at} goes on, and the later one, at "
        "{address}, is refused; to do there: delete identity.key in the state folder, so that it "
        "becomes a node of its own",
        _E,
    ),
    EventSpec("candidate.assigned", "{peer} is to run stage {stage}"),
    EventSpec(
        "candidate.lost", "{peer} is gone, who was to enter: its place is free ({reason})", _W
    ),
    EventSpec("member.accepted", "{actor} lets {peer} in"),
    EventSpec("member.rejected", "{actor} does not let {peer} in"),
    EventSpec(
        "member.asking",
        "{peer} at {address} asks to be let in with token {token}: `decod node accept {id}` or"
        " `decod node refuse {id}`",
        _W,
    ),
    EventSpec("member.leaving", "{peer} leaves: {reason}"),
    EventSpec(
        "stage.ending",
        "{peer} is the last member of stage {stage}: without another, the run goes back",
        _W,
    ),
    EventSpec("member.lost", "{peer} is gone: {reason}", _W),
    EventSpec("stage.lost", "STAGE {stage} LOST after iteration {iteration}", _W),
    EventSpec("stage.waiting", "WAITING: {reason}", _E),
    EventSpec(
        "stage.rebuilt",
        "stage {stage} is rebuilt ({source}): {num_repeated} iterations repeated, {duration_s} s",
        _W,
    ),
    EventSpec(
        "run.recut",
        "the model is cut anew after iteration {iteration}: its stages have {blocks} blocks,"
        " {duration_s} s",
    ),
    EventSpec("recut.begun", "the model is to be cut anew, into {blocks} blocks: {reason}"),
    EventSpec("recut.failed", "the model is not cut anew: {reason}", _W),
    EventSpec(
        "quorum.lost",
        "NO QUORUM: {num_gone} of {num_total} members are gone, and training waits for some",
        _E,
    ),
    EventSpec("run.opened", "training begins with iteration {iteration}: {reason}"),
    EventSpec("iteration.committed", "iteration {iteration} is committed, loss {loss}", _D),
    EventSpec(
        "iteration.mended", "iteration {iteration} goes on: {reason}; others do its part again", _W
    ),
    EventSpec("iteration.aborted", "iteration {iteration} is repeated: {reason}", _W),
    EventSpec("clients.entered", "iteration {iteration} goes on with more clients: {reason}", _D),
    EventSpec("iteration.kept", "iteration {iteration} is committed all the same: {reason}", _W),
    # Collaborative runs: peers with training loops of their own.
    EventSpec("peer.admitted", "{peer} takes part, from round {round} on"),
    EventSpec("peer.lost", "{peer} is gone: {reason}", _W),
    EventSpec("coordinator.followed", "{peer} coordinates, at round {round}"),
    EventSpec("coordinator.lost", "{peer}, which coordinated, is gone", _W),
    EventSpec(
        "coordinator.succeeded",
        "this node coordinates, in term {term}, and goes on from round {round}: nobody has a later "
        "state that is known here",
    ),
    EventSpec(
        "state.sought",
        "nobody is left who is known to have the run's state: this host, which has not loaded it, "
        "looks for others",
        _W,
    ),
    EventSpec("coordinator.leaves", "{successor} is to coordinate: this host's loop stands still"),
    EventSpec("samples.lost", "{samples} samples are lost: the others went on without them", _W),
    EventSpec("round.closing", "{averaging} closes: the batch is full", _D),
    EventSpec("round.begun", "{averaging} begins", _D),
    EventSpec(
        "round.committed",
        "round {round}: {samples} samples of {peers} hosts, {own} of this one",
        _D,
    ),
    EventSpec("round.repeated", "{averaging} is repeated without {lost}", _W),
    EventSpec("round.failed", "{peer} could not average: {reason}", _W),
    EventSpec("round.abandoned", "{averaging} is abandoned: {reason}", _W),
    EventSpec("round.differs", "{averaging} is another average here than at the others", _E),
    EventSpec("peer.loaded", "the state of round {round} is loaded"),
    EventSpec("peer.unloaded", "the state of round {round} could not be loaded: {reason}", _W),
    EventSpec(
        "state.on_disk",
        "the copy of the state for newcomers lies in {folder}: /dev/shm has no room for it. In a"
        " container, --shm-size gives it more",
    ),
    EventSpec(
        "state.uncopied",
        "nobody can join from this host's state: {reason}. Give /dev/shm more room, in a container"
        " with --shm-size, or free disk space in /tmp",
        _W,
    ),
    EventSpec(
        "peer.outrun",
        "loading the run's state takes longer than {rounds} rounds, so it begins anew; a larger"
        " target batch size makes rounds longer",
        _W,
    ),
    EventSpec("loop.waited", "the training loop has waited {seconds} s in vain, and goes on", _W),
)

EVENTS: dict[str, EventSpec] = {spec.name: spec for spec in _SPECS}
"""Every registered event, by name."""


def event_level(name: str) -> int:
    """Return the level of an event; INFO if it is not registered."""
    spec = EVENTS.get(name)
    return spec.level if spec else logging.INFO


def _show(value: object) -> str:
    # Six digits are enough for a person. The log file keeps all of them.
    return f"{value:.6g}" if isinstance(value, float) else clean_text(value)


def render_note(event: str, fields: Mapping[str, object]) -> str:
    """Return one line for people: the event's text, then the fields that it does not mention.

    Never raises, even on strange fields: they may come from a peer.
    """
    spec = EVENTS.get(event)
    shown = {key: _show(value) for key, value in list(fields.items())[:NUM_FIELDS_MAX]}
    if spec is None:
        text, mentioned = clean_text(event), list[str]()
    else:
        # Not str.format: a peer's string may hold braces.
        text = re.sub(r"\{([a-z_]+)\}", lambda match: shown.get(match[1], "?"), spec.text)
        mentioned = list(spec.fields)
    rest = [f"{clean_text(key)}={value}" for key, value in shown.items() if key not in mentioned]
    return " ".join([text, *rest])
