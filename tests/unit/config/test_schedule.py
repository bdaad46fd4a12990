"""Schedules: what is written, when it is open, and when that next changes."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.schedule import Window, WorkHours

BERLIN = ZoneInfo("Europe/Berlin")
KOLKATA = ZoneInfo("Asia/Kolkata")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")
"""Its clocks change by half an hour."""

MONDAY = datetime(2026, 11, 23, tzinfo=UTC)


def opened(text: str, hour: int, minute: int = 0, *, day: int = 0) -> bool:
    """Whether a schedule is open at a time of a day, 0 for Monday."""
    wall = MONDAY + timedelta(days=day, hours=hour, minutes=minute)
    return WorkHours.parse(text).is_open(wall)


def test_a_window_across_midnight_belongs_to_the_evening() -> None:
    assert opened("22:00-07:00", 22)
    assert opened("22:00-07:00", 6, 59)
    assert not opened("22:00-07:00", 7)
    assert not opened("22:00-07:00", 21, 59)
    friday = "Fri 22:00-07:00"
    assert opened(friday, 23, day=4)
    assert opened(friday, 3, day=5)
    assert not opened(friday, 3, day=4)
    assert not opened(friday, 23, day=5)
    sunday = "Sun 22:00-02:00"
    assert opened(sunday, 1, day=0)
    assert not opened(sunday, 1, day=1)


def test_weekdays_hold_until_others_are_named() -> None:
    text = "Mon-Fri 12:00-13:00, 22:00-07:00; Sat,Sun 00:00-24:00 daily 09:00-09:30"
    assert opened(text, 12, 30, day=4)
    assert opened(text, 6, day=2)
    assert not opened(text, 14, day=3)
    assert all(opened(text, hour, day=5) for hour in range(24))
    assert opened(text, 9, 15, day=1)
    around = "Sat-Mon 10:00-11:00"
    assert [opened(around, 10, day=day) for day in range(7)] == [True, *[False] * 4, True, True]


def test_no_schedule_is_always_open() -> None:
    always = WorkHours.parse("always")
    assert always == WorkHours()
    assert str(always) == "always"
    assert always.is_open(MONDAY)
    assert always.next_change(MONDAY, BERLIN) is None
    whole = WorkHours.parse("00:00-24:00")
    assert whole.is_open(MONDAY)
    assert whole.next_change(MONDAY, BERLIN) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no time and no weekday"),
        ("22-7", "no time and no weekday"),
        ("22:00", "no time and no weekday"),
        ("Mon-Fry 22:00-07:00", "'mon-fry'"),
        ("weekend 22:00-07:00", "'weekend'"),
        ("25:00-07:00", "from 00:00 to 24:00"),
        ("24:00-07:00", "from 00:00 to 24:00"),
        ("22:60-07:00", "from 00:00 to 24:00"),
        ("22:00-22:00", "00:00-24:00 for a whole day"),
        ("22:00-07:00 Sat", "'sat' has no time"),
        ("always 22:00-07:00", "'always'"),
        ("٢٢:00-07:00", "no time and no weekday"),
        ("1:00-2:00 " * 200, "1000 characters"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_part_that_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WorkHours.parse(text)


windows = st.builds(
    lambda days, start, length: Window(days, start, start + length),
    st.frozensets(st.integers(0, 6), min_size=1),
    st.integers(0, 1439),
    st.integers(1, 1439),
)
schedules = st.builds(WorkHours, st.lists(windows, min_size=1, max_size=3).map(tuple))


@given(schedules)
def test_a_schedule_that_is_shown_is_read_again(schedule: WorkHours) -> None:
    assert WorkHours.parse(str(schedule)) == schedule


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = WorkHours.parse(text)
    except ValueError:
        return
    assert WorkHours.parse(str(schedule)) == schedule


changing = st.sampled_from(
    [
        # About when clocks change in Berlin, and on Lord Howe Island.
        datetime(2026, 3, 28, 23, tzinfo=UTC),
        datetime(2026, 10, 24, 22, tzinfo=UTC),
        datetime(2026, 4, 4, 12, tzinfo=UTC),
        datetime(2026, 10, 3, 12, tzinfo=UTC),
        MONDAY,
    ]
)


@given(schedules, changing, st.sampled_from([BERLIN, KOLKATA, LORD_HOWE]), st.integers(0, 300))
def test_the_next_change_is_the_first_minute_with_another_state(
    schedule: WorkHours, start: datetime, zone: ZoneInfo, minutes: int
) -> None:
    now = start + timedelta(minutes=minutes, seconds=20)
    change = schedule.next_change(now, zone)
    open_now = schedule.is_open(now.astimezone(zone))
    first = now.replace(second=0) + timedelta(minutes=1)
    for step in range(600):
        instant = first + timedelta(minutes=step)
        if schedule.is_open(instant.astimezone(zone)) != open_now:
            assert change is not None
            assert change.astimezone(UTC) == instant
            return
    assert change is None or change.astimezone(UTC) >= first + timedelta(minutes=600)


def test_the_wall_clock_decides_when_clocks_change() -> None:
    """The night of the change to summer time lasts eight hours instead of nine."""
    night = WorkHours.parse("22:00-07:00")
    evening = datetime(2026, 3, 28, 21, 30, tzinfo=BERLIN)
    begins = night.next_change(evening, BERLIN)
    assert begins == datetime(2026, 3, 28, 22, 0, tzinfo=BERLIN)
    ends = night.next_change(begins, BERLIN)
    assert ends is not None
    assert ends.hour == 7
    assert ends.astimezone(UTC) - begins.astimezone(UTC) == timedelta(hours=8)
    # A window whose beginning the clock skips opens when the clock has skipped it.
    skipped = WorkHours.parse("02:30-05:00").next_change(evening, BERLIN)
    assert skipped is not None
    assert (skipped.hour, skipped.minute) == (3, 0)
