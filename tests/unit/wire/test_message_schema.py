"""What classes say of their fields is complete, and numbers on the wire never change."""

import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from decod.limits import AtLeast, AtMost, Count, Unique
from decod.wire.message_schema import snake_case, struct_of

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class _Bare:
    number: int


@dataclass
class _Endless:
    numbers: tuple[Count, ...]


@dataclass
class _Mistaken:
    number: Annotated[Count, AtMost(3)]


@dataclass
class _Whole:
    numbers: Annotated[tuple[Count, ...], AtLeast(1), AtMost(3), Unique()]
    pair: tuple[Count, Count]
    maybe: Count | None


@pytest.mark.parametrize(
    ("cls", "says"),
    [(_Bare, "no limit"), (_Endless, "without AtMost"), (_Mistaken, "AtMost for nothing")],
)
def test_every_field_says_how_much_it_may_hold(cls: type, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        struct_of(cls)


def test_a_class_says_everything() -> None:
    numbers, pair, maybe = struct_of(_Whole).parts
    assert (numbers.num_min, numbers.num_max, numbers.unique) == (1, 3, ())
    assert (pair.num_min, pair.num_max, pair.unique) == (2, 2, None)
    assert (maybe.optional, maybe.repeated) == (True, False)


def test_names_of_fields_in_the_envelope() -> None:
    assert [snake_case(name) for name in ("Ping", "CanTake")] == ["ping", "can_take"]


def test_a_field_keeps_its_number_and_a_lost_one_is_never_used_again() -> None:
    numbers_class = runpy.run_path(str(ROOT / "scripts/gen_protos.py"))["Numbers"]
    numbers = numbers_class({"first": 1, "gone": 2, "last": 7}, {3})
    assert numbers.of(["last", "new", "first"]) == {"last": 7, "new": 8, "first": 1}
    assert numbers.reserved == {2, 3}
    last = numbers_class({"first": 1, "gone": 2})
    assert last.of(["first", "new"]) == {"first": 1, "new": 3}
