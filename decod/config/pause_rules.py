"""The causes for which a node pauses by itself, as its operator names them."""

import difflib
import re
from enum import StrEnum


class PauseRule(StrEnum):
    """A cause for which a node pauses by itself, and resumes when it is gone."""

    BUSY_GPU = "busy-gpu"
    """Processes of others compute on the node's GPU, or hold much of its memory."""
    BATTERY = "battery"
    """The machine runs on its battery."""
    HOT = "hot"
    """A processor is about as hot as its maker allows."""
    KEYBOARD = "keyboard"
    """Somebody uses the machine."""


DEFAULT_PAUSE_RULES = (PauseRule.BATTERY,)
"""Few machines that stay where they are have a battery, so this surprises nobody. The other rules
depend on what a machine is used for: a shared server is hot and busy by design."""

NO_RULES = "none"


def read_rules(text: str) -> tuple[PauseRule, ...]:
    """Return the rules that a text such as `battery,hot` names, each once; none for `none`.

    Raises:
        ValueError: A word is no rule.
    """
    words = re.split(r"[\s,]+", text[:200].strip().lower())
    if words == [NO_RULES]:
        return ()
    for word in words:
        if word not in tuple(PauseRule):
            near = difflib.get_close_matches(word, list(PauseRule), n=1)
            known = f"they are {', '.join(PauseRule)}, or {NO_RULES} alone"
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"{word[:60]!r} is no cause for a pause: {hint}{known}")
    return tuple(rule for rule in PauseRule if rule in words)


def show_rules(rules: tuple[PauseRule, ...]) -> str:
    """Return rules as `read_rules` reads them."""
    return ",".join(rules) or NO_RULES
