"""Readers of a status that another node may have told, and texts on who holds the run up.

A value of the wrong type counts as absent. In a status that is None, all are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from decod.texts import clean_text


def mapping_in(values: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """Return the object that `values` has under a name, or an empty one."""
    value = None if values is None else values.get(name)
    return value if isinstance(value, Mapping) else {}


def sequence_in(values: Mapping[str, Any] | None, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the objects of the list that `values` has under a name, or none."""
    value = None if values is None else values.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def number_in(values: Mapping[str, Any], name: str) -> int | float | None:
    """Return the finite number that `values` has under a name, or None.

    An integer beyond 2^53 counts as absent: no honest node sends one, and not every reader of JSON
    can hold it.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= 2**53 and math.isfinite(value) else None


_BY = {
    "computing": "its device computes for {share} % of an iteration",
    # An estimate: what its sends take beyond the usual work of the others.
    "sending": "waiting for the uplink of {name} takes about {wait} % of the time, since its sends"
    " take {share} % of an iteration",
}


def slow_texts(status: Mapping[str, Any] | None) -> list[str]:
    """Return a text on each member that holds the run up, the worst first."""
    texts = []
    for one in sequence_in(status, "slow"):
        share, usual = number_in(one, "share"), number_in(one, "usual_share")
        pattern = _BY.get(str(one.get("by")))
        if pattern is None or share is None or usual is None:
            continue
        stage = number_in(one, "stage_index")
        where = "" if stage is None else f" (stage {stage})"
        name, wait = _name(one), max(0.0, share - usual)
        what = pattern.format(name=name, wait=_percent(wait), share=_percent(share))
        texts.append(
            f"{name}{where} holds the run up: {what}, and the others are usually busy for"
            f" {_percent(usual)} %"
        )
    return texts


def arrival_text(sync: Mapping[str, Any]) -> str:
    """Return how late averages count that travel while members train on; empty if that is not
    known. The argument is a status's `sync`.
    """
    delay, every, fragments = (number_in(sync, name) for name in ("delay", "every", "fragments"))
    if not (delay and every):
        return ""
    phase = max(1, int(every) // int(fragments or 1))
    return f"averages arrive after {delay} of {phase} iterations"


def spent_text(node: Mapping[str, Any]) -> str:
    """Return what one of a status's nodes spends its time on; empty if that is not known."""
    parts = [number_in(node, name) for name in ("computing_s", "waiting_s", "sending_s")]
    if any(part is None for part in parts):
        return ""
    computing_s, waiting_s, sending_s = (part or 0.0 for part in parts)
    if (whole_s := computing_s + waiting_s) <= 0:
        return ""
    return (
        f"computes {_percent(computing_s / whole_s)} %, waits {_percent(waiting_s / whole_s)} %,"
        f" sends {_percent(min(1.0, sending_s / whole_s))} %"
    )


def known_spent(stages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the members of a status's stages that have said what they spend, with a text each."""
    nodes = [node for stage in stages for node in sequence_in(stage, "nodes")]
    return [(_name(node), text) for node in nodes if (text := spent_text(node))]


def _name(one: Mapping[str, Any]) -> str:
    return clean_text(one.get("name") or one.get("id") or "?", limit=40)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
