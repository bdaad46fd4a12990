"""Golden traces: each file in `scenarios/` is a story of a few nodes, told by what they say.

A file holds commands, and after each `----` what came of it, up to an empty line:

    run stages=1 microbatches=1         begins; any number of `ProtocolConfig` as well
    start d0 capacity=2                 starts a node
    settle                              all that needs no time happens
    until Forward to=r1a                the same, but stops before such a message arrives
    wait 5.0                            time passes
    lose | repeat | hold Deny from=r1a  the first such message on its way
    release                             messages held arrive
    kill r1a; drain r1a [9.0]           ends a node; asks it to leave (within so many seconds)
    pause r1a; resume r1a               asks it to take no microbatches; to take them again
    work r1a | refuse r1a reason        the first job of a node's device ends
    show                                the state of every node

`pytest tests/unit/protocol --rewrite` writes what happens now; read the difference before you
commit it. Heartbeats, utilisation queries and their answers are not shown.
"""

from pathlib import Path

import pytest

from decod.ids import NodeId
from decod.protocol.core.events import DrainRequested, PauseRequested
from tests.unit.protocol.cast import configured
from tests.unit.protocol.world import Parcel, World

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
_QUIET = ("Heartbeat", "UtilisationQuery", "UtilisationAnswer")


class Story:
    """Runs the commands of one file."""

    def __init__(self) -> None:
        self.world = World()
        self.held: list[Parcel] = []

    def tell(self, command: str) -> list[str]:
        """Run a command; returns what came of it."""
        self.world.seen.clear()
        verb, *words = command.split()
        getattr(self, f"do_{verb}")(words)
        return [line for line in self.world.seen if not any(word in line for word in _QUIET)]

    def do_run(self, words: list[str]) -> None:
        numbers = {key: float(value) for key, value in (word.split("=") for word in words)}
        stages, microbatches, iterations, clips = (
            int(numbers.pop(key, default))
            for key, default in (
                ("stages", 1),
                ("microbatches", 1),
                ("iterations", 0),
                ("clips", 0),
            )
        )
        self.world = World(
            config=configured(**{k: int(v) if v == int(v) else v for k, v in numbers.items()}),
            num_stages=stages,
            num_microbatches=microbatches,
            num_iterations=iterations,
            clips=bool(clips),
        )

    def do_start(self, words: list[str]) -> None:
        options = dict(word.split("=") for word in words[1:])
        stage = options.get("stage")
        self.world.start(
            words[0],
            capacity=int(options.get("capacity", 1)),
            stage_index=int(stage) if stage else None,
        )

    def do_settle(self, words: list[str]) -> None:
        self.world.settle()

    def do_until(self, words: list[str]) -> None:
        self.world.settle(words)

    def do_wait(self, words: list[str]) -> None:
        self.world.wait(float(words[0]))

    def do_lose(self, words: list[str]) -> None:
        self.world.fail(self.world.take(words))

    def do_hold(self, words: list[str]) -> None:
        self.held.append(self.world.take(words))

    def do_release(self, words: list[str]) -> None:
        while self.held:
            self.world.deliver(self.held.pop(0))

    def do_repeat(self, words: list[str]) -> None:
        parcel = next(p for p in self.world.flight if p.matches(words))
        assert parcel.tensor is None, "only control messages are repeated here"
        self.world.flight.appendleft(parcel)

    def do_kill(self, words: list[str]) -> None:
        self.world.kill(words[0])

    def do_drain(self, words: list[str]) -> None:
        limits = (float(word) for word in words[1:])
        self.world.step(words[0], DrainRequested(*limits))

    def do_pause(self, words: list[str]) -> None:
        self.world.step(words[0], PauseRequested(paused=True))

    def do_resume(self, words: list[str]) -> None:
        self.world.step(words[0], PauseRequested(paused=False))

    def do_work(self, words: list[str]) -> None:
        self.world.work(words[0])

    def do_refuse(self, words: list[str]) -> None:
        self.world.work(words[0], refuse=" ".join(words[1:]))

    def do_show(self, words: list[str]) -> None:
        for node, host in self.world.hosts.items():
            machine = host.machine
            shown = f"{node} {machine.state.value} iteration={machine.context.iteration}"
            flows = ""
            if machine.strategy.flows is not None:
                paired = sorted(machine.strategy.flows.outflows.paired.items())
                flows = "".join(f" {flow_id}<-{upstream}" for flow_id, upstream in paired)
            self.world.seen.append(f"{shown}{flows}")


def retell(text: str) -> str:
    """Return a scenario with the results that its commands have now."""
    story, told, skipping = Story(), [], False
    for line in text.splitlines():
        if line == "----":
            skipping = True
        elif skipping:
            skipping = bool(line)
        if skipping and line != "----":
            continue
        if line and line != "----" and not line.startswith("#"):
            told += [line, "----", *story.tell(line)]
        elif line != "----":
            told.append(line)
    return "\n".join(told).rstrip() + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_ends_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    expected = path.read_text(encoding="utf-8")
    told = retell(expected)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(told, encoding="utf-8")
    else:
        assert told == expected


def test_there_are_scenarios_and_telling_one_twice_changes_nothing() -> None:
    text = SCENARIOS[0].read_text(encoding="utf-8")
    assert retell(retell(text)) == retell(text)
    assert NodeId("d0") in Story().world.hosts or SCENARIOS
