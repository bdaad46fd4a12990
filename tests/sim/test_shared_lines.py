"""Hosts of one site share its connection."""

from functools import partial

from decod.sim.kernel import Kernel
from decod.sim.network import InFlight, LinkFaults, Links, LinkSpec, Network, Site

NEAR, FAR = LinkSpec(0.0, 10e6), LinkSpec(0.0, 1e6)
MB = 1_000_000


class Host:
    """An endpoint that always works."""

    reachable = refuses = True
    frozen_until_s = 0.0

    def __init__(self, name: str) -> None:
        self.name = name


class Places:
    """Sites a and b of four hosts each, with 1 MB/s for each direction, and the host c alone."""

    def __init__(self, rate: float = 1e6) -> None:
        self.kernel = Kernel()
        self.ends: dict[str, float] = {}
        sites = [
            Site(tuple(f"{name}{index}" for index in range(1, 5)), NEAR, rate, rate)
            for name in "ab"
        ]
        links = Links(FAR, sites=tuple(sites))
        self.network = Network(self.kernel, links, LinkFaults(), seed=1)

    def send(self, sender: str, receiver: str, size_bytes: int) -> None:
        def end(what: str, *_: object) -> None:
            self.ends[f"{sender}-{receiver}{what}"] = round(self.kernel.now_s, 1)

        self.network.send_tensor(
            InFlight(
                sender=Host(sender),
                receiver=Host(receiver),
                size_bytes=size_bytes,
                delivered=partial(end, ""),
                sent=None,
                failed=partial(end, " failed"),
            )
        )

    def run(self) -> dict[str, float]:
        self.kernel.run(until_s=1e9)
        return self.ends


def test_hosts_of_a_site_share_its_way_out() -> None:
    places = Places()
    for index in range(1, 5):
        places.send(f"a{index}", f"b{index}", 10 * MB)
    assert set(places.run().values()) == {40.0}


def test_hosts_of_a_site_share_its_way_in() -> None:
    places = Places()
    places.send("a1", "b1", 10 * MB)
    places.send("c", "b2", 10 * MB)
    assert places.run() == {"a1-b1": 20.0, "c-b2": 20.0}


def test_both_directions_are_full_at_once() -> None:
    places = Places()
    places.send("a1", "b1", 10 * MB)
    places.send("b1", "a1", 10 * MB)
    assert places.run() == {"a1-b1": 10.0, "b1-a1": 10.0}


def test_what_one_tensor_leaves_is_for_the_others() -> None:
    """Both have 500 kB/s until the small one is through after 10 s."""
    places = Places()
    places.send("a1", "b1", 5 * MB)
    places.send("a2", "b2", 15 * MB)
    assert places.run() == {"a1-b1": 10.0, "a2-b2": 20.0}


def test_inside_a_site_nothing_is_shared() -> None:
    places = Places()
    places.send("a1", "a2", 10 * MB)
    places.send("a3", "a4", 10 * MB)
    places.send("a1", "b1", 10 * MB)
    assert places.run() == {"a1-a2": 1.0, "a3-a4": 1.0, "a1-b1": 10.0}


def test_tensors_of_a_pair_take_turns_on_a_shared_line() -> None:
    places = Places()
    places.send("a1", "b1", 5 * MB)
    places.send("a2", "b2", 10 * MB)
    places.send("a1", "b1", 5 * MB)
    assert places.run() == {"a1-b1": 20.0, "a2-b2": 20.0}


def test_tensors_that_a_crowded_line_carries_too_slowly_are_given_up() -> None:
    """Each would take 1,000 s alone and has 1,547 s."""
    places = Places(100_000.0)
    places.send("a1", "b1", 100 * MB)
    places.send("a2", "b2", 100 * MB)
    assert places.run() == {"a1-b1 failed": 1546.9, "a2-b2 failed": 1546.9}
