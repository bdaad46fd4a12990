"""Links keep order, share bandwidth, and say how every send ended."""

from dataclasses import dataclass
from functools import partial

from decod.sim.kernel import Kernel
from decod.sim.network import InFlight, LinkFaults, Links, LinkSpec, Network


@dataclass
class Stub:
    name: str
    reachable: bool = True
    refuses: bool = True
    frozen_until_s: float = 0.0


class Wires:
    """Two endpoints on one link of 1 s and 100 bytes a second, and what happened on it."""

    def __init__(self, faults: LinkFaults | None = None, *, seed: int = 1) -> None:
        self.kernel = Kernel()
        self.seen: list[tuple[float, str]] = []
        links = Links(LinkSpec(latency_s=1.0, bandwidth_bytes_per_s=100.0))
        self.network = Network(self.kernel, links, faults or LinkFaults(), seed=seed)
        self.a, self.b = Stub("a"), Stub("b")

    def note(self, what: str, *_: object) -> None:
        self.seen.append((round(self.kernel.now_s, 6), what))

    def transfer(self, name: str, *, size_bytes: int = 0) -> InFlight:
        return InFlight(
            sender=self.a,
            receiver=self.b,
            size_bytes=size_bytes,
            delivered=partial(self.note, f"{name} delivered"),
            sent=partial(self.note, f"{name} sent"),
            failed=partial(self.note, f"{name} failed"),
        )

    def run(self) -> list[tuple[float, str]]:
        self.kernel.run(until_s=1e9)
        return self.seen


def test_tensors_of_a_pair_take_turns() -> None:
    wires = Wires()
    wires.network.send_tensor(wires.transfer("x", size_bytes=200))
    wires.network.send_tensor(wires.transfer("y", size_bytes=100))
    assert wires.run() == [
        (3.0, "x delivered"),
        (4.0, "y delivered"),
        (4.0, "x sent"),
        (5.0, "y sent"),
    ]


def test_an_answer_takes_the_way_back() -> None:
    wires = Wires()
    wires.network.change(wires.b, wires.a, LinkSpec(latency_s=7.0, bandwidth_bytes_per_s=1.0))
    wires.network.send_tensor(wires.transfer("x", size_bytes=200))
    assert wires.run() == [(3.0, "x delivered"), (10.0, "x sent")]


def test_a_control_message_does_not_wait_behind_a_tensor() -> None:
    wires = Wires()
    wires.network.send_tensor(wires.transfer("tensor", size_bytes=1000))
    wires.network.send_control(wires.transfer("control"))
    assert next(what for _, what in wires.run()) == "control delivered"


def test_control_messages_keep_their_order_when_some_are_late() -> None:
    wires = Wires(LinkFaults(delay_ratio=0.5, delay_max_s=30.0))
    for index in range(50):
        wires.network.send_control(wires.transfer(str(index)))
    delivered = [what.split()[0] for _, what in wires.run() if what.endswith("delivered")]
    assert delivered == [str(index) for index in range(50)]


def test_every_send_ends_once_under_loss() -> None:
    wires = Wires(LinkFaults(loss_ratio=0.3))
    for index in range(200):
        wires.network.send_control(wires.transfer(f"c{index}"))
        wires.network.send_tensor(wires.transfer(f"t{index}", size_bytes=10))
    ends = [what.split()[0] for _, what in wires.run() if not what.endswith("delivered")]
    assert sorted(ends) == sorted([f"c{i}" for i in range(200)] + [f"t{i}" for i in range(200)])
    failed = sum(what.endswith("failed") for _, what in wires.seen)
    assert 60 < failed < 180


def test_duplicates_arrive_after_the_first() -> None:
    wires = Wires(LinkFaults(duplicate_ratio=1.0))
    wires.network.send_control(wires.transfer("x"))
    assert [what for _, what in wires.run()] == ["x delivered", "x delivered", "x sent"]


def test_a_dead_process_refuses_and_a_dead_machine_is_silent() -> None:
    for refuses, failed_s in ((True, 4.0), (False, 6.0)):
        wires = Wires()
        wires.b.reachable, wires.b.refuses = False, refuses
        wires.network.send_control(wires.transfer("x"))
        assert wires.run() == [(failed_s, "x failed")]


def test_a_tensor_of_a_sender_that_died_does_not_arrive() -> None:
    wires = Wires()
    wires.network.send_tensor(wires.transfer("x", size_bytes=100))
    wires.kernel.at(0.5, lambda: setattr(wires.a, "reachable", False))
    assert wires.run() == []


def test_a_message_to_a_stalled_host_counts_as_failed_and_yet_arrives() -> None:
    wires = Wires()
    wires.b.frozen_until_s = 100.0
    wires.network.send_control(wires.transfer("x"))
    assert [what for _, what in wires.run()] == ["x delivered", "x failed"]


def test_a_cut_link_lets_nothing_through_until_it_heals() -> None:
    wires = Wires()
    wires.network.cut("a", "b", until_s=10.0)
    wires.network.send_control(wires.transfer("x"))
    wires.kernel.at(20.0, lambda: wires.network.send_control(wires.transfer("y")))
    assert [what for _, what in wires.run()] == ["x failed", "y delivered", "y sent"]


def test_links_differ_by_pair_and_are_the_same_for_a_seed() -> None:
    links = Links(spread_ratio=0.5)
    assert links.between("a", "b", seed=1) == links.between("a", "b", seed=1)
    assert links.between("a", "b", seed=1) != links.between("b", "a", seed=1)
