"""Why is this node idle? From its status if it runs, and from its records if it does not."""

from collections.abc import Callable
from dataclasses import replace

from decod.clocks import wall_clock
from decod.insight.why_evidence import Explanation, Figure, NodeRecords, WhyQuestion
from decod.insight.why_removed import is_back, last_end, last_removal, text_of, why_removed
from decod.insight.why_slow import (
    COLLECT,
    FASTER_DATA,
    SEND_LESS,
    SENDING_SHARE,
    TimeShares,
    costliest_hop,
    of_others,
    percent,
    shares_of,
)
from decod.journal.told_status import mapping_in, sequence_in
from decod.protocol.core.effects import StopReason
from decod.texts import clean_text, span

BUSY_SHARE = 0.5
"""A device that computes for this share of the time is not idle."""

_WELL = ("training", "aggregating")


def why_idle(records: NodeRecords) -> Explanation:
    """Answer why the node's device does nothing, or little."""
    if records.status is None:
        return _of_ended(records)
    node = mapping_in(records.status, "node")
    state, run_state = node.get("state"), records.status.get("run_state")
    answer = _BY_STATE.get(str(state))
    if answer is not None:
        return answer(records)
    if run_state not in _WELL:
        return _of_run(records)
    return _of_training(records)


def _idle(cause: str, remedy: str, *figures: Figure | None, known: bool = True) -> Explanation:
    return Explanation(
        question=WhyQuestion.IDLE,
        applies=True,
        cause=cause,
        remedy=remedy,
        known=known,
        figures=tuple(each for each in figures if each is not None),
    )


def _message(records: NodeRecords) -> str:
    assert records.status is not None
    return clean_text(records.status.get("message") or "", limit=500)


def _with(cause: str, detail: str) -> str:
    return f"{cause}: {detail}" if detail else cause


# --- the daemon runs ----------------------------------------------------------------------------


def _of_paused(records: NodeRecords) -> Explanation:
    node = mapping_in(records.status, "node")
    assert records.status is not None
    # All nodes are paused when all iterations are done.
    is_done = records.status.get("run_state") in ("paused", "finished")
    if is_done and node.get("capacity") and not node.get("device_free"):
        return _of_run(records)
    pausing = mapping_in(records.status, "pausing")
    causes = [clean_text(each.get("detail"), limit=300) for each in sequence_in(pausing, "causes")]
    if causes and pausing.get("by_person") is not True:
        return _idle(
            f"this node has paused itself: {'; '.join(causes)}",
            "wait, or change its schedule and rules: `decod set` shows them",
        )
    freed = ", and its device is free" if node.get("device_free") is True else ""
    paused = [each.time_s for each in records.events if each.event == "node.paused"]
    figure = None
    if paused:
        age_s = max(0.0, wall_clock() - paused[-1])
        figure = Figure(name="paused_s", value=round(age_s, 1), text=f"paused {span(age_s)} ago")
    return _idle(f"the operator of this node has paused it{freed}", "run `decod resume`", figure)


def _of_draining(_: NodeRecords) -> Explanation:
    return _idle(
        "this node leaves the run: it was asked to drain, and takes no more microbatches",
        "wait until it ends, and start it again if it should go on",
    )


def _of_reconnecting(records: NodeRecords) -> Explanation:
    answer = _idle(
        _with("this node is out of its run, and looks for it", _message(records)),
        "run `decod doctor`; the node joins again by itself",
    )
    end = last_removal(records.events)
    if end is None or is_back(records.events, end):
        return answer
    removed = why_removed(records)
    return replace(answer, figures=(*removed.figures,))


def _of_syncing(records: NodeRecords) -> Explanation:
    syncing = mapping_in(records.status, "syncing")
    failed = [each for each in records.of_this_life if each.event == "replay.failed"]
    figures = [
        Figure(name=name, value=value, text=f"{value:,.4g} {unit}")
        for name, unit in (
            ("percent", "% of the state are here"),
            ("bytes_per_s", "bytes/s"),
            ("left_s", "s left until it can take microbatches"),
        )
        if isinstance(value := syncing.get(name), int | float)
    ]
    if failed:
        text = f"the last try failed: {text_of(failed[-1])}"
        figures.append(Figure(name="num_replays_failed", value=len(failed), text=text))
    return _idle(
        "this node still loads the state of its stage, and can't compute before",
        "wait; if it takes very long, run `decod doctor` and look at the network",
        *figures,
    )


def _of_candidate(records: NodeRecords) -> Explanation:
    """A node on its way in: the leader has not taken it yet, or it is not ready."""
    refused = [each for each in records.of_this_life if each.event == "candidate.refused"]
    if refused:
        last = refused[-1]
        reason = clean_text(last.fields.get("reason"), limit=300)
        age_s = max(0.0, wall_clock() - last.time_s)
        return _idle(
            f"the run does not take this node yet: {reason}",
            "leave it running, since it asks again by itself; or ask the organiser for a place",
            Figure(
                name="num_refused",
                value=len(refused),
                text=f"refused {len(refused)} times, last {span(age_s)} ago",
            ),
        )
    state, message = mapping_in(records.status, "node").get("state"), _message(records)
    return _idle(
        f"this node is on its way into the run ({clean_text(state)}); "
        + (message or "its records don't say what it waits for"),
        "wait a minute; if it does not enter then, run `decod doctor`",
        known=bool(message),
    )


_BY_STATE: dict[str, Callable[[NodeRecords], Explanation]] = {
    "paused": _of_paused,
    "draining": _of_draining,
    "reconnecting": _of_reconnecting,
    "syncing": _of_syncing,
    "starting": _of_candidate,
    "joining": _of_candidate,
}


def _of_run(records: NodeRecords) -> Explanation:
    """The run stands still, so all its nodes do."""
    assert records.status is not None
    run_state = clean_text(records.status.get("run_state"))
    figures = []
    for stage in sequence_in(records.status, "stages"):
        nodes = sequence_in(stage, "nodes")
        if not any(node.get("capacity") for node in nodes):
            index = stage.get("index")
            what = "no node" if not nodes else "only paused nodes"
            figures.append(
                Figure(
                    name=f"stage_{index}_num_nodes",
                    value=len(nodes),
                    text=f"stage {index} has {what}",
                )
            )
    remedies = {
        "paused": "nothing: all iterations are done",
        "finished": "nothing: the run is over",
        "starting": "wait a minute; if the run does not begin then, ask the organiser",
        "waiting": "ask the organiser to bring the missing nodes back",
    }
    add = "start a relay for the stage without one (`decod join --stage`), or resume a paused one"
    return _idle(
        _with(f"the run does not train now ({run_state})", _message(records)),
        remedies.get(run_state, add),
        *figures,
    )


def _of_training(records: NodeRecords) -> Explanation:
    """The run trains, and this node is a member that may work."""
    shares, hop = shares_of(records.rounds), costliest_hop(records.status)
    own = mapping_in(records.status, "node").get("id")
    members = _stage_of(records)
    flows = next((each.get("flows") for each in members if each.get("id") == own), None)
    assert records.status is not None
    has_flows = records.status.get("organisation") != "servers"
    if flows == 0 and has_flows:
        return _without_flows(records, shares)
    if shares is None:
        return replace(
            _idle(
                "this node trains, and its records don't tell yet how it spends its time",
                "ask again after a few iterations",
                known=False,
            ),
            applies=False,
        )
    if shares.compute >= BUSY_SHARE:
        return Explanation(
            question=WhyQuestion.IDLE,
            applies=False,
            cause=f"this node is not idle: its device computes {percent(shares.compute)} of the"
            " time",
            remedy="",
            figures=shares.figures(),
        )
    cause, remedy = _cause_of_waiting(shares), _remedy_of_waiting(shares)
    if remedy == COLLECT and (slow := of_others(records)) is not None:
        cause, remedy = f"{cause}; {slow[0]}", slow[1]
    return _idle(cause, remedy, *shares.figures(), hop)


def _stage_of(records: NodeRecords) -> list[dict[str, object]]:
    """Return the nodes of this node's stage."""
    index = mapping_in(records.status, "node").get("stage_index")
    return [
        dict(node)
        for stage in sequence_in(records.status, "stages")
        if stage.get("index") == index
        for node in sequence_in(stage, "nodes")
    ]


def _without_flows(records: NodeRecords, shares: TimeShares | None) -> Explanation:
    members = _stage_of(records)
    flows = [value for node in members if isinstance(value := node.get("flows"), int)]
    slots = [value for node in members if isinstance(value := node.get("capacity"), int)]
    stage = mapping_in(records.status, "node").get("stage_index")
    if sum(flows):
        cause = f"no flow passes through this node: others of stage {stage} have them all"
        remedy = (
            "leave it as a reserve, or ask the organiser for another stage or for a larger"
            " batch.num_microbatches"
        )
    else:
        cause = f"no flow passes through stage {stage} now, and the records don't tell why"
        remedy = "ask again in a minute; if that stays, run `decod doctor`"
    return _idle(
        cause,
        remedy,
        Figure(
            name="stage_num_flows",
            value=sum(flows),
            text=f"{sum(flows)} flows pass stage {stage}, whose {len(members)} nodes have room for"
            f" {sum(slots)}",
        ),
        *(() if shares is None else shares.figures()),
        known=sum(flows) > 0,
    )


def _cause_of_waiting(shares: TimeShares) -> str:
    most, what = max(
        (shares.wait_passes, "tensors of other stages"),
        (shares.wait_start, "the first microbatch of an iteration"),
        (shares.wait_average, "the other nodes in the average and the commit"),
        (shares.data, "data"),
    )
    wait = shares.wait + shares.data
    return (
        f"this node's device waits {percent(wait)} of the time, most of it for {what}"
        f" ({percent(most)})"
    )


def _remedy_of_waiting(shares: TimeShares) -> str:
    if shares.data == max(shares.data, shares.wait_passes, shares.wait_start, shares.wait_average):
        return FASTER_DATA
    return SEND_LESS if shares.transfer >= SENDING_SHARE else COLLECT


# --- no daemon runs -----------------------------------------------------------------------------


def _of_ended(records: NodeRecords) -> Explanation:
    """No daemon answers: say how the node's last life ended."""
    if any(each.startswith("status:") for each in records.unread):
        problem = next(each for each in records.unread if each.startswith("status:"))
        return _idle(
            f"a daemon may run here, but its status can't be read ({problem})",
            "run the command as the user of the daemon; if it hangs, read node.log",
            known=False,
        )
    events, end = records.events, last_end(records.events)
    shares = shares_of(records.rounds)
    figures = () if shares is None else shares.figures()
    started = [index for index, each in enumerate(events) if each.event == "node.started"]
    if end is None or (started and started[-1] > end.index):
        since_s = events[started[-1]].time_s if started else 0.0
        crashes = [name for name, at_s in records.crashes if at_s >= since_s]
        if crashes:
            return _idle(
                f"no node runs here: it crashed, and its report is {crashes[-1]}",
                "send the report with `decod bugreport`, and start the node again",
                *figures,
            )
        return _idle(
            "no node runs here, and its log ends without a goodbye: the process was killed, or the"
            " host lost power, and the records don't tell which",
            "start the node again; `decod service install` has the machine do that",
            *figures,
            known=False,
        )
    age_s = max(0.0, wall_clock() - end.time_s)
    ended = Figure(name="ended_s", value=round(age_s, 1), text=f"it ended {span(age_s)} ago")
    well = {
        StopReason.FINISHED.value: ("the run is over", "nothing, or join another run"),
        StopReason.DRAINED.value: ("it has left the run", "start it again with `decod join`"),
        StopReason.PAUSED.value: ("it was paused", "start it again with `decod join`"),
    }
    if end.reason in well:
        cause, remedy = well[end.reason]
        detail = f" ({end.detail})" if end.detail else ""
        return _idle(f"no node runs here: {cause}{detail}", remedy, ended, *figures)
    removed = why_removed(records)
    return _idle(
        f"no node runs here: {removed.cause}",
        removed.remedy,
        *removed.figures,
        *figures,
        known=removed.known,
    )
