"""When a machine wants to be woken."""


def earliest(*deadlines_s: float | None) -> float | None:
    """Return the first of some instants; None if there is none."""
    first: float | None = None
    for deadline_s in deadlines_s:
        if deadline_s is not None and (first is None or deadline_s < first):
            first = deadline_s
    return first
