"""The decision to pause, in virtual time; and the probes, on hosts that a test describes."""

import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decod.config.schedule import PauseRule, WorkHours
from decod.daemon.pausing.pause_probes import (
    CALM_S,
    SCHEDULE,
    Circumstances,
    GpuProcess,
    NvidiaMl,
    OwnGpu,
    PauseRules,
    Sighting,
    UnknownError,
    battery,
    busy_gpu,
    hot,
    keyboard,
)

BATTERY, HOT = PauseRule.BATTERY, PauseRule.HOT
NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
ALWAYS = WorkHours()


class Host:
    """A host as time goes on."""

    def __init__(self, schedule: str = "always", *rules: PauseRule) -> None:
        self._machine = PauseRules()
        self.schedule, self.rules = WorkHours.parse(schedule), rules or tuple(PauseRule)

    def causes(self, now_s: float, **seen: bool | None) -> dict[str, float | None]:
        """Returns the causes at a time after noon, each with the seconds that it still counts."""
        sightings = {
            PauseRule(name.replace("_", "-")): Sighting(holds, f"{name} was seen")
            for name, holds in seen.items()
        }
        found = Circumstances(NOON + timedelta(seconds=now_s), sightings, UTC)
        causes = self._machine.step(now_s, found, schedule=self.schedule, rules=self.rules)
        return {cause.name: cause.calm_s for cause in causes}


def test_a_cause_holds_at_once_and_until_it_has_been_away_for_a_while() -> None:
    host = Host()
    assert host.causes(0.0, battery=False) == {}
    assert host.causes(2.0, battery=True) == {"battery": None}
    assert host.causes(50.0, battery=True) == {"battery": None}
    assert host.causes(52.0, battery=False) == {"battery": 8.0}
    # It comes back before it has been forgotten.
    assert host.causes(54.0, battery=True) == {"battery": None}
    assert host.causes(63.9, battery=False) == {"battery": pytest.approx(0.1)}
    assert host.causes(64.0, battery=False) == {}
    assert host.causes(64.1, battery=False) == {}


def test_several_causes_hold_each_for_itself() -> None:
    host = Host("00:00-12:05")
    assert host.causes(0.0, battery=True, hot=True) == {"battery": None, "hot": None}
    assert host.causes(20.0, battery=False, hot=False) == {"hot": 280.0}
    assert host.causes(300.0, battery=False, hot=False) == {SCHEDULE: None}
    assert host.causes(310.0, keyboard=True) == {SCHEDULE: None, "keyboard": None}


def test_what_can_not_be_known_counts_as_away() -> None:
    host = Host()
    assert host.causes(0.0, hot=None) == {}
    host.causes(1.0, hot=True)
    assert host.causes(2.0, hot=None) == {"hot": 299.0}
    assert host.causes(301.0) == {}


def test_a_rule_that_is_switched_off_counts_no_more() -> None:
    host = Host("always", BATTERY, HOT)
    assert host.causes(0.0, battery=True, hot=True) == {"battery": None, "hot": None}
    host.rules = (HOT,)
    assert host.causes(1.0, battery=True, hot=True) == {"hot": None}
    host.rules = (BATTERY, HOT)
    assert host.causes(2.0, battery=False, hot=True) == {"hot": None}


def test_the_schedule_says_when_it_opens() -> None:
    machine = PauseRules()
    night = WorkHours.parse("22:00-07:00")
    (cause,) = machine.step(0.0, Circumstances(NOON, zone=UTC), schedule=night, rules=())
    assert cause.name == SCHEDULE
    assert cause.until == NOON.replace(hour=22)
    assert "22:00-07:00" in cause.detail
    at_night = Circumstances(NOON.replace(hour=23))
    assert machine.step(1.0, at_night, schedule=night, rules=()) == ()


steps = st.lists(
    st.tuples(
        st.floats(0.1, 200.0),
        st.dictionaries(st.sampled_from(PauseRule), st.sampled_from([True, False, None])),
    ),
    max_size=30,
)


@given(steps)
def test_a_cause_counts_exactly_while_it_was_seen_within_its_calm_time(
    steps: list[tuple[float, dict[PauseRule, bool | None]]],
) -> None:
    machine, now_s = PauseRules(), 0.0
    seen_s: dict[PauseRule, float] = {}
    for wait_s, seen in steps:
        now_s += wait_s
        seen_s |= {rule: now_s for rule, holds in seen.items() if holds}
        found = Circumstances(NOON, {rule: Sighting(holds) for rule, holds in seen.items()})
        causes = machine.step(now_s, found, schedule=ALWAYS, rules=tuple(PauseRule))
        expected = {rule for rule, then_s in seen_s.items() if then_s + CALM_S[rule] > now_s}
        assert {cause.name for cause in causes} == expected
        seen_s = {rule: seen_s[rule] for rule in expected}


# --- probes ---------------------------------------------------------------------------------------

OWN = OwnGpu("GPU-1", 10)


class FakeNvml:
    """A driver that says what a test wants."""

    def __init__(self, *processes: GpuProcess, heat: tuple[float, float] | None = None) -> None:
        self.found, self.temperature = list(processes), heat
        self.num_asked = 0

    def processes(self, uuid: str) -> list[GpuProcess]:
        assert uuid == OWN.uuid
        self.num_asked += 1
        return list(self.found)

    def heat(self, uuid: str) -> tuple[float, float]:
        if self.temperature is None:
            raise UnknownError("no driver")
        return self.temperature


MINE = GpuProcess(OWN.pid, 30 << 30, 1.0)


@pytest.mark.parametrize(
    ("others", "busy"),
    [
        ([], False),
        ([GpuProcess(1, 300 << 20, 0.03)], False),
        ([GpuProcess(1, 300 << 20, 0.2)], True),
        ([GpuProcess(1, 0, 0.1), GpuProcess(2, 0, 0.15)], True),
        ([GpuProcess(1, 2 << 30, 0.0)], True),
    ],
)
def test_a_gpu_is_busy_if_others_compute_on_it_or_hold_much_of_it(
    others: list[GpuProcess], busy: bool
) -> None:
    assert busy_gpu((OWN,), FakeNvml(MINE, *others)).holds is busy
    assert busy_gpu((), FakeNvml(*others)).holds is False


def test_where_the_driver_does_not_name_the_own_process_nobody_is_blamed() -> None:
    """As in a container: the node's process has another id there, and would pause itself."""
    for processes in ([], [GpuProcess(4711, 30 << 30, 1.0)]):
        assert busy_gpu((OWN,), FakeNvml(*processes)).holds is None


def test_one_busy_gpu_of_several_is_enough() -> None:
    """The node's processes may appear on each other's GPUs."""
    own = (OwnGpu("GPU-1", 10), OwnGpu("GPU-2", 11))
    found = {
        "GPU-1": [GpuProcess(10, 1 << 30, 0.5), GpuProcess(11, 3 << 30, 0.5)],
        "GPU-2": [GpuProcess(11, 1 << 30, 0.5)],
    }
    driver = FakeNvml()
    driver.processes = found.__getitem__  # type: ignore[method-assign]
    assert busy_gpu(own, driver).holds is False
    found["GPU-2"].append(GpuProcess(12, 0, 0.3))
    assert busy_gpu(own, driver).holds is True
    found["GPU-1"].clear()
    assert busy_gpu(own, driver).holds is True
    found["GPU-2"].pop()
    assert busy_gpu(own, driver).holds is None


Sensors = dict[str, list[Any]]


def sensor(current: float, high: float | None = None, label: str = "") -> Any:
    return SimpleNamespace(label=label, current=current, high=high, critical=None)


@pytest.mark.parametrize(
    ("sensors", "heat", "holds"),
    [
        ({}, None, None),
        ({"nvme": [sensor(99.0, 80.0)]}, None, None),
        ({"coretemp": [sensor(70.0, 80.0), sensor(80.0, 80.0)]}, None, True),
        ({"coretemp": [sensor(79.0, 80.0)]}, None, False),
        ({"k10temp": [sensor(89.0)]}, None, False),
        ({"k10temp": [sensor(90.0, 65_261.0)]}, None, True),
        ({"acpitz": [sensor(30.0, 0.0)]}, (91.0, 90.0), True),
        ({}, (60.0, 90.0), False),
    ],
)
def test_a_machine_is_hot_if_a_processor_is_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
    sensors: Sensors,
    heat: tuple[float, float] | None,
    holds: bool | None,
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: sensors)
    own = () if heat is None else (OWN,)
    assert hot(own, FakeNvml(heat=heat)).holds is holds


def test_a_gpu_without_a_temperature_does_not_hide_the_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"k10temp": [sensor(95.0)]})
    assert hot((OWN,), FakeNvml()).holds is True
    monkeypatch.setattr(psutil, "sensors_temperatures", dict)
    with pytest.raises(UnknownError):
        hot((OWN,), FakeNvml())


@pytest.mark.parametrize(("plugged", "holds"), [(True, False), (False, True), (None, None)])
def test_a_battery_is_used_if_no_power_is_plugged_in(
    monkeypatch: pytest.MonkeyPatch, plugged: bool | None, holds: bool | None
) -> None:
    found = SimpleNamespace(percent=41.7, power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: found)
    assert battery().holds is holds
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert battery().holds is False


@pytest.mark.parametrize(("said", "holds"), [("IdleHint=no\n", True), ("IdleHint=yes\n", False)])
def test_the_login_manager_knows_whether_somebody_is_there(said: str, holds: bool) -> None:
    assert keyboard(0.0, loginctl=lambda: said, terminals=()).holds is holds


def test_without_a_login_manager_the_last_input_to_a_terminal_counts(tmp_path: Path) -> None:
    def found(now_s: float) -> bool | None:
        terminals = [str(tmp_path / "[0-9]*")]
        return keyboard(now_s, loginctl=lambda: None, terminals=terminals).holds

    assert found(0.0) is None
    for name, last_s in (("0", 1000.0), ("1", 400.0), ("ptmx", 5000.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (last_s, 0.0))
    assert found(1299.0) is True
    assert found(1300.0) is False
    # Clocks are set back now and then.
    assert found(900.0) is True


def test_without_the_driver_or_its_package_nothing_is_known() -> None:
    with pytest.raises(UnknownError, match=r"not installed|does not answer|does not know"):
        NvidiaMl().processes("GPU-none")


class Library:
    """`pynvml`, as far as it is used."""

    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1

    class NVMLError(Exception):
        """As NVML raises."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.idle = False

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=10, usedGpuMemory=5), SimpleNamespace(pid=11, usedGpuMemory=7)]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=11, usedGpuMemory=None)]

    def nvmlDeviceGetProcessUtilization(self, _: str, since: int) -> list[Any]:  # noqa: N802
        self.asked.append(since)
        if self.idle:
            raise self.NVMLError("not found")
        return [SimpleNamespace(pid=11, timeStamp=123, smUtil=40)]

    def nvmlDeviceGetTemperature(self, _: str, kind: int) -> int:  # noqa: N802
        return 66

    def nvmlDeviceGetTemperatureThreshold(self, _: str, kind: int) -> int:  # noqa: N802
        return 92


def test_what_the_driver_says_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    driver = NvidiaMl()
    assert driver.processes("GPU-1") == [GpuProcess(10, 5, 0.0), GpuProcess(11, 7, 0.4)]
    library.idle = True
    assert driver.processes("GPU-1")[1] == GpuProcess(11, 7, 0.0)
    assert library.asked == [0, 123], "it is asked for what came after the last sample"
    assert driver.heat("GPU-1") == (66.0, 92.0)
