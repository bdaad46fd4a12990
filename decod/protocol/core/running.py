"""Whoever runs jobs has one method for each class of them, which says so: `@runs(jobs.Forward)`."""

from collections.abc import Callable
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])

_MARK = "_runs"


def runs(*job_classes: type) -> Callable[[_Method], _Method]:
    """Mark a method as the one that runs jobs of these classes."""

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, job_classes)
        return method

    return mark


def methods_of(runner: object) -> dict[type, Callable[..., Any]]:
    """Return the methods of an object that are marked, by the classes of jobs that they run.

    A subclass's method goes before one of a base class that runs the same jobs.
    """
    found: dict[type, Callable[..., Any]] = {}
    for base in reversed(type(runner).__mro__):
        for name, member in vars(base).items():
            for job_class in getattr(member, _MARK, ()):
                found[job_class] = getattr(runner, name)
    return found
