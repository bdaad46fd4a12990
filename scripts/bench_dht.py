"""Measure what the DHT costs each member: `python scripts/bench_dht.py`.

All members of a run take part in this process, over loopback sockets. They join one after the
other, with the addresses of three members, and then publish as daemons do. Prints the time to join,
what a member sends and computes in a minute, and how many lookups succeed: at rest, and after a
fifth of the members was killed. Then it prints what a stranger's datagrams cost a member. With 200
members and five minutes of rest, it takes eight minutes.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from decod.daemon.succession import RECORD_TTL_S  # noqa: E402
from decod.ids import RunId  # noqa: E402
from decod.membership.papers import Membership  # noqa: E402
from decod.net.dht import Dht, DhtPorts  # noqa: E402
from decod.net.dht_datagram import (  # noqa: E402
    GREETING,
    GREETING_SIZE_BYTES,
    REQUEST,
    framed,
    run_tag,
)
from decod.net.dht_protocol import DhtProtocol  # noqa: E402
from decod.net.dht_record import LEADER, LEADER_TTL_MAX_S, PEER  # noqa: E402
from decod.net.dht_table import DhtLimits  # noqa: E402
from tests.support.members import data_node, new_volunteer  # noqa: E402

RUN = RunId("r" * 26)
NUM_KNOWN = 3
KILLED = 0.2
NUM_AT_A_TIME = 4


@dataclass(slots=True)
class Traffic:
    """Datagrams that all members have sent."""

    num: int = 0
    size_bytes: int = 0

    def count(self) -> None:
        """Count from now on what any protocol of this process sends."""
        send = DhtProtocol._send

        def counted(protocol: DhtProtocol, datagram: bytes, address: tuple[str, int]) -> None:
            self.num += 1
            self.size_bytes += len(datagram)
            send(protocol, datagram, address)

        DhtProtocol._send = counted  # type: ignore[assignment, method-assign]


class Members:
    """The members of one run, all in this process."""

    def __init__(self, num: int, rng: random.Random) -> None:
        self._rng = rng
        self._papers: list[Membership] = [data_node("leader")]
        self._papers += [new_volunteer(f"volunteer {i}") for i in range(1, num)]
        self._addresses: list[str] = []
        ports = DhtPorts(known=lambda: self._addresses[:1])
        self.nodes = [Dht(each, RUN, ports) for each in self._papers]

    async def join(self) -> list[float]:
        """Let one after the other join; return the seconds that each took."""
        return [await _seconds(self._enter(node)) for node in self.nodes]

    async def _enter(self, node: Dht) -> None:
        port = await node.start("127.0.0.1", 0)
        await node.bootstrap(self._addresses[:NUM_KNOWN])
        self._addresses.append(f"127.0.0.1:{port}")
        await node.publish(PEER, {"address": self._addresses[-1]}, RECORD_TTL_S)
        if node is self.nodes[0]:
            leads = {"address": self._addresses[0], "term": 1}
            await node.publish(LEADER, leads, LEADER_TTL_MAX_S)

    async def look_up(self, num_at_a_time: int) -> tuple[float, list[float]]:
        """Let each live member look up the leader and another member.

        Returns:
            The part of the lookups that succeeded, and the seconds that each took.
        """
        found: list[bool] = []
        few = asyncio.Semaphore(num_at_a_time)

        async def look_up(node: Dht, name: str, owner: Membership) -> float:
            async def once() -> None:
                found.append(await node.lookup(name, owner.node_id) is not None)

            async with few:
                return await _seconds(once())

        lookups = []
        for node in self.nodes:
            lookups.append(look_up(node, LEADER, self._papers[0]))
            lookups.append(look_up(node, PEER, self._rng.choice(self._papers)))
        times_s = await asyncio.gather(*lookups)
        return statistics.mean(found), times_s

    async def kill(self, share: float) -> int:
        """End some members other than the leader without a word; return how many."""
        num = int(share * len(self.nodes))
        ended = set(self._rng.sample(range(1, len(self.nodes)), num))
        await asyncio.gather(*(self.nodes[i].close() for i in ended))
        live = [i for i in range(len(self.nodes)) if i not in ended]
        self.nodes = [self.nodes[i] for i in live]
        self._papers = [self._papers[i] for i in live]
        return num

    def throw(self) -> None:
        """Throw a stranger's datagrams at the leader, and print what one costs it."""
        protocol = self.nodes[0]._protocol
        assert protocol is not None
        false = bytearray(self._papers[1].state("dht introduction", bytes(32)).to_bytes())
        false[-1] ^= 1
        greeting = GREETING + bytes(12) + run_tag(RUN) + framed(bytes(false))
        shapes = {
            "noise": bytes([77]) * 1200,
            "a request in no session": REQUEST * 1100,
            "a false introduction": greeting.ljust(GREETING_SIZE_BYTES, b"\0"),
        }
        for name, datagram in shapes.items():
            # Few enough that introductions are checked, and not dropped because of their number.
            num = DhtLimits().greetings_burst if datagram[:1] == GREETING else 10_000
            start_s = time.process_time()
            for _ in range(int(num)):
                protocol.datagram_received(datagram, ("192.0.2.1", 7))
            cost_us = 1e6 * (time.process_time() - start_s) / num
            print(f"strangers: {name} costs {cost_us:.1f} us", flush=True)

    async def close(self) -> None:
        """End all members."""
        await asyncio.gather(*(node.close() for node in self.nodes))


async def _seconds(work: Awaitable[object]) -> float:
    start_s = time.perf_counter()
    await work
    return time.perf_counter() - start_s


def _of(times_s: Sequence[float]) -> str:
    ordered = sorted(times_s)
    return (
        f"median {1000 * statistics.median(ordered):.0f} ms,"
        f" 99 % within {1000 * ordered[int(0.99 * (len(ordered) - 1))]:.0f} ms"
    )


async def bench(num: int, rest_s: float, seed: int) -> None:
    """Run the members and print the figures."""
    traffic, members = Traffic(), Members(num, random.Random(seed))  # noqa: S311
    traffic.count()
    joins_s = await members.join()
    contacts = statistics.mean(node.num_contacts for node in members.nodes)
    print(f"{num} members, {contacts:.0f} contacts each", flush=True)
    print(f"join:    {_of(joins_s)}, {traffic.num / num:.0f} datagrams a member", flush=True)

    sent, size, cpu_s = traffic.num, traffic.size_bytes, time.process_time()
    start_s = time.monotonic()
    await asyncio.sleep(rest_s)
    minutes = (time.monotonic() - start_s) / 60 * num
    sent_rate, size_rate = (traffic.num - sent) / minutes, (traffic.size_bytes - size) / minutes
    used_ms = 1000 * (time.process_time() - cpu_s) / minutes
    print(f"at rest: a member sends {sent_rate:.1f} datagrams a minute, {size_rate / 1000:.1f} kB")
    print(f"         and computes {used_ms:.1f} ms a minute", flush=True)

    success, times_s = await members.look_up(1)
    print(f"lookups: {success:.2%} succeed, {_of(times_s)}", flush=True)
    num_killed = await members.kill(KILLED)
    # Most of the time they wait for the dead.
    success, times_s = await members.look_up(NUM_AT_A_TIME)
    print(f"         after {num_killed} were killed: {success:.2%} succeed, {_of(times_s)}")
    members.throw()
    await members.close()


def main(arguments: Sequence[str]) -> None:
    """Parse the arguments, and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--members", type=int, default=200, help="members of the run (default: 200)")
    add("--rest-s", type=float, default=300.0, help="seconds at rest (default: 300)")
    add("--seed", type=int, default=1, help="decides who looks up whom (default: 1)")
    options = parser.parse_args(arguments)
    asyncio.run(bench(options.members, options.rest_s, options.seed))


if __name__ == "__main__":
    main(sys.argv[1:])
